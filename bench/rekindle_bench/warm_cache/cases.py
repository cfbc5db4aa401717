"""The cases. Each appends its rows immediately; ways are taken by turns."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rekindle_bench.case import NotPlannedError
from rekindle_lab import guests
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.web import Client, rates

from . import native
from .cache_guests import CacheEnvironment, CacheGuest
from .helper import helper_back
from .plan import Files, Plan
from .rows import Row
from .watch import Watch, cached_kib

MICRO_FILE = "/bytes/65536"
TPCH = Path(__file__).parent / "tpch"
OTHER_ROUNDS = 3
"""Rounds with other limits of the disk than the first."""
WARM, COLD = "warm-cache", "cold"
COLD_READ = "cold-read"
"""Way: a cold reboot, after which all files of the database are read before its first run, so that no disk counts."""
READ_ALL = "find /var/lib/postgresql /usr/lib/postgresql /usr/lib/x86_64-linux-gnu -type f -exec cat {} + >/dev/null"
_ENGINES = {"mmap-read": ("read", "mmap"), "mmap-write": ("write", "mmap"), "bytes": ("write:4095", "psync")}


def fio(guest: CacheGuest, what: str, block: int, mib: int, *options: str) -> tuple[int, int]:
    """Lets the guest access its file once; returns bytes and microseconds."""
    way, engine = _ENGINES.get(what, (what, "psync"))
    size = mib << 20
    if what == "bytes":
        options = (*options, f"--io_size={size // 4096}")
    words = (
        f"fio --name=x --filename={guest.file} --size={size} --bs={block} --rw={way} --ioengine={engine} --invalidate=0"
    )
    words += f" --gtod_reduce=1 --thread --output-format=json {' '.join(options)}"
    output = guest.ssh(words)
    job = json.loads(output[output.index("{") :])["jobs"][0]
    counters = job["read"] if way == "read" else job["write"]
    if counters["io_bytes"] == 0:
        raise RekindleError(f"{guest.name}: fio moved nothing: {words}")
    # If the end waits for the disk, that time is only in the job's, not in that of the writes.
    took = max(counters["runtime"], job.get("job_runtime", 0))
    return counters["io_bytes"], took * 1000


def settle(guest: CacheGuest) -> None:
    """Writes back everything, and keeps the kernel from writing back by itself."""
    guest.ssh(
        "sync; sysctl -q vm.dirty_ratio=90 vm.dirty_background_ratio=80 vm.dirty_expire_centisecs=360000"
        " vm.dirty_writeback_centisecs=0"
    )


def access(
    env: CacheEnvironment, guest: CacheGuest, case: str, one: Files, how: str, limit: str, number: int, at: int
) -> None:
    """Accesses the file, and appends a row."""
    moved, took = fio(guest, one.what, one.block, one.mib)
    given = {"memory_mib": guest.memory_mib, "block": one.block, "bytes": moved, "us": took}
    env.rows.append(Row(case, one.what, how, limit, number, at, **given))
    if "write" in one.what:
        guest.ssh("sync")


def access_around_reboot(
    env: CacheEnvironment, guest: CacheGuest, case: str, one: Files, how: str, limit: str, number: int
) -> None:
    """Accesses the file, reboots, and accesses it again, twice each; records the memory that the host uses for that."""
    for at in (-2, -1):
        access(env, guest, case, one, how, limit, number, at)
    with Watch(guest.name, env.ram_dir) as watch:
        steps = env.reboot(guest, WARM if how == WARM else COLD).get("steps", [])
        settle(guest)
        access(env, guest, case, one, how, limit, number, 1)
    memory(env, guest, watch, case, how, limit, number, steps)
    access(env, guest, case, one, how, limit, number, 2)


def memory(
    env: CacheEnvironment, guest: CacheGuest, watch: Watch, case: str, how: str, limit: str, number: int, steps: object
) -> None:
    """Appends a row with the memory of the host at the peak."""
    cached = cached_kib(guest.disk) if guest.disk else None
    served = env.from_retained_cache(guest) if guest.cache == "server" else None
    given = {"ram_kib": watch.ram_kib, "private_kib": watch.private_kib, "code_kib": watch.code_kib}
    other = {
        "memory_mib": guest.memory_mib,
        "bytes": served,
        "cached_kib": cached,
        "steps": steps if isinstance(steps, list) else [],
    }
    env.rows.append(Row(case, "memory", how, limit, number, **given, **other))


def turns(number: int, ways: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the ways in alternating order: A B, B A, A B."""
    return ways if number % 2 == 0 else ways[::-1]


def files(kind: Callable[[Files], bool], limit: int = 0) -> Callable[[CacheEnvironment, Plan], None]:
    """Returns the case of figures 5 to 7: one guest, rebooted with its cache and cold by turns.

    `limit`: the disk's, by its index in the plan; fewer rounds with others than the first.
    """

    def case(env: CacheEnvironment, plan: Plan) -> None:
        accesses = [one for one in plan.files if kind(one)]
        if not accesses or limit >= len(plan.limits):
            raise NotPlannedError
        name = plan.limits[limit]
        env.limit_rates(None)
        with env.ours(env.cached("files", plan.memory_mib, 1)) as guest:
            assert isinstance(guest, CacheGuest)
            env.limit_rates(name)
            settle(guest)
            for one in accesses:
                for number in range(one.rounds if limit == 0 else min(one.rounds, OTHER_ROUNDS)):
                    for how in turns(number, (WARM, COLD)):
                        access_around_reboot(env, guest, "files", one, how, name, number)
                    env.log(f"files: {name}: {one.what} of {one.block}, {number + 1} of {one.rounds}")
            env.limit_rates(None)

    return case


def folios(env: CacheEnvironment, plan: Plan) -> None:
    """Measures the same on a file system that caches in large pieces, so that a guest has less work per page."""
    if not plan.folios:
        raise NotPlannedError
    env.limit_rates(None)
    limit = plan.limits[0]
    with env.ours(replace(env.cached("folios", plan.memory_mib, 7), data=True)) as guest:
        assert isinstance(guest, CacheGuest)
        guest.mount()
        guest.ssh(f"cp /srv/file {guest.file} && sync && umount /mnt && echo 3 >/proc/sys/vm/drop_caches")
        guest.mount()
        env.limit_rates(limit)
        settle(guest)
        for one in plan.folios:
            for number in range(one.rounds):
                for how in turns(number, (WARM, COLD)):
                    access_around_reboot(env, guest, "folios", one, how, limit, number)
                env.log(f"folios: {one.what} of {one.block}, {number + 1} of {one.rounds}")
        env.limit_rates(None)


def peers(env: CacheEnvironment, plan: Plan) -> None:
    """Measures figures 11 and 12: QEMU has the disk, with the host's cache and without."""
    if not plan.peers:
        raise NotPlannedError
    limit = plan.limits[0]
    for cache in ("writeback", "none"):
        env.limit_rates(None)
        with env.ours(env.cached("peer", plan.memory_mib, 2, cache)) as guest:
            assert isinstance(guest, CacheGuest)
            env.limit_rates(limit)
            settle(guest)
            for one in plan.peers:
                for number in range(one.rounds):
                    access_around_reboot(env, guest, "peers", one, cache, limit, number)
            env.limit_rates(None)
        env.log(f"peers: cache={cache}")


def map_cost(env: CacheEnvironment, plan: Plan) -> None:
    """Measures figures 8 to 10: the cost of the map without reboots. Two guests; all accesses reach the disk."""
    if env.slow:
        env.limit_rates(None)
    image = env.image("debian-cache")
    kinds = (("read", 4096, ()), ("write", 4096, ("--end_fsync=1",)), ("bytes", 1, ("--end_fsync=1",)))
    disks = {how: env.disk_dir / f"{how}.raw" for how in ("map", "no-map")}
    try:
        for disk in disks.values():
            guests.copy_sparse(image.folder / "disk.raw", disk)
        with (
            native.ours(env, disks["map"], "map", "--queues=1") as with_map,
            native.ours(env, disks["no-map"], "nomap", "--queues=1", "--no-map") as without,
            env.ours(env.cached("with", 768, 3, str(with_map.socket))) as one,
            env.ours(env.cached("without", 768, 4, str(without.socket))) as other,
        ):
            both = {"map": (one, with_map), "no-map": (other, without)}
            for number in range(plan.map_rounds):
                for what, block, options in kinds:
                    for how in turns(number, ("map", "no-map")):
                        guest, server = both[how]
                        assert isinstance(guest, CacheGuest)
                        # What is written stays cached, as in the paper: only then does a write of one byte per page
                        # not read the page first.
                        guest.ssh("sync" + ("; echo 3 >/proc/sys/vm/drop_caches" if what == "read" else ""))
                        before = server.used_us()
                        moved, took = fio(guest, what, block, plan.map_mib, *options)
                        given = {"bytes": moved, "us": took, "cpu_us": server.used_us() - before}
                        env.rows.append(Row("map", what, how, "none", number, memory_mib=768, block=block, **given))
                env.log(f"map: {number + 1} of {plan.map_rounds}")
    finally:
        for disk in disks.values():
            disk.unlink(missing_ok=True)


def tpch(env: CacheEnvironment, plan: Plan) -> None:
    """Measures table 1: the 22 queries one after the other, twice before a reboot and twice after it."""
    env.limit_rates(None)
    queries = "".join(path.read_text() for path in sorted(TPCH.glob("q*.sql")))
    run = f"cat >/run/tpch.sql <<'SQL'\n\\set ON_ERROR_STOP on\n\\timing on\n\\o /dev/null\n{queries}\nSQL\n"
    run += "date +%s.%N; psql -U postgres -h /var/run/postgresql -f /run/tpch.sql tpch; date +%s.%N"
    limit = plan.limits[0]
    with env.ours(env.cached("tpch", 1024, 5)) as guest:
        assert isinstance(guest, CacheGuest)
        env.limit_rates(limit)

        def power(how: str, number: int, at: int) -> None:
            """Runs the 22 queries once; the run with `at` 0 only fills the cache."""
            lines = guest.ssh(run).split("\n")
            times = [float(found[1]) for line in lines if (found := re.match(r"Time: ([0-9.]+) ms", line))]
            stamps = [float(line) for line in lines if re.fullmatch(r"\d+\.\d+", line)]
            if len(times) != 22 or len(stamps) != 2:
                raise RekindleError(f"tpch: {len(times)} of 22 queries have a time")
            steps = [{"step": f"Q{n}", "us": round(ms * 1000)} for n, ms in enumerate(times, 1)]
            took = round((stamps[1] - stamps[0]) * 1e6)
            if at == 0:
                return
            served = env.from_retained_cache(guest) if at == 1 and how == WARM else None
            given = {"bytes": served, "us": took, "steps": steps}
            env.rows.append(Row("tpch", "tpch", how, limit, number, at, guest.memory_mib, **given))

        power(WARM, 0, 0)
        for number in range(plan.tpch):
            for how in turns(number, (WARM, COLD, COLD_READ)):
                for at in range(-plan.tpch_runs, 0):
                    power(how, number, at)
                env.reboot(guest, WARM if how == WARM else COLD)
                if how == COLD_READ:
                    guest.ssh(READ_ALL)
                for at in range(1, plan.tpch_runs + 1):
                    power(how, number, at)
            env.log(f"tpch: {number + 1} of {plan.tpch}")
        env.limit_rates(None)


def http(env: CacheEnvironment, plan: Plan) -> None:
    """Measures figure 13: one client requests 4,000 files, one at a time, while the guest is rebooted."""
    env.limit_rates(None)
    limit = plan.limits[0]
    with env.ours(env.cached("http", 1024, 6)) as guest:
        assert isinstance(guest, CacheGuest)
        # It would start while the web server works already.
        guest.ssh("systemctl disable --now postgresql@15-main")
        env.limit_rates(limit)
        # micro, which stands in for the guest in a trial, has one file.
        paths = [MICRO_FILE if guest.stands_in else f"/many/{n:04}" for n in range(plan.web_files)]
        with Client(guest.netns, guest.address, paths) as client:
            client.wait(len(paths))
            for number in range(plan.http):
                for how in turns(number, (WARM, COLD)):
                    # Requests all files once more after a cold reboot, so that all are cached.
                    client.wait(len(paths))
                    begin = time.monotonic()
                    time.sleep(plan.http_s)
                    rebooted = time.monotonic()
                    with Watch(guest.name, env.ram_dir) as watch:
                        steps = env.reboot(guest, how).get("steps", [])
                        well = time.monotonic()
                        time.sleep(plan.http_s)
                    seconds = rates(client.answers, begin, rebooted, well, time.monotonic())
                    for second, requests, moved, took in seconds:
                        given = {"bytes": moved, "us": took, "requests": requests, "second": second}
                        row = Row("http", "http", how, limit, number, memory_mib=guest.memory_mib, block=65536, **given)
                        env.rows.append(row)
                    memory(env, guest, watch, "http", how, limit, number, steps)
                env.log(f"http: {number + 1} of {plan.http}")
        env.limit_rates(None)


CASES: dict[str, Callable[[CacheEnvironment, Plan], None]] = {
    "native": native.native,
    "attic": native.retained,
    "read": files(lambda one: one.what == "read" and one.block >= 4096),
    "small": files(lambda one: one.what == "read" and one.block < 4096),
    "write": files(lambda one: one.what == "write"),
    "mmap": files(lambda one: one.what.startswith("mmap")),
    "cloud": files(lambda one: (one.what, one.block) == ("read", 4096), limit=1),
    "folios": folios,
    "map": map_cost,
    "http": http,
    "tpch": tpch,
    "peers": peers,
    "helper": helper_back,
}
