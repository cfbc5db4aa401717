"""The cases in which a guest accesses a file before and after a reboot: figures 5 to 7, 11 and 12 of the paper.

The guest accesses the file twice before each reboot and twice after it. In the rows, `at` is -2, -1, 1 and 2.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rekindle_bench.case import NotPlannedError
from rekindle_lab.rekindle import RekindleError

from .cache_guests import CacheEnvironment, CacheGuest
from .plan import FileAccess, Plan
from .rows import Row
from .watch import Watch, cached_kib
from .ways import COLD, WARM, turns

OTHER_ROUNDS = 3
"""Largest number of rounds for each limit of the disk but the first."""
_FIO_MODES = {"mmap-read": ("read", "mmap"), "mmap-write": ("write", "mmap"), "bytes": ("write:4095", "psync")}
"""Options `rw` and `ioengine` of fio. `bytes` writes one byte of each page, then skips 4095."""


def fio(guest: CacheGuest, what: str, block: int, mib: int, *options: str) -> tuple[int, int]:
    """Makes the guest access its file once; returns bytes and microseconds."""
    mode, engine = _FIO_MODES.get(what, (what, "psync"))
    file_bytes = mib << 20
    if what == "bytes":
        options = (*options, f"--io_size={file_bytes // 4096}")
    command = f"fio --name=x --filename={guest.file} --size={file_bytes} --bs={block} --rw={mode} --ioengine={engine}"
    command += f" --invalidate=0 --gtod_reduce=1 --thread --output-format=json {' '.join(options)}"
    output = guest.ssh(command)
    job = json.loads(output[output.index("{") :])["jobs"][0]
    counters = job["read"] if mode in ("read", "randread") else job["write"]
    if counters["io_bytes"] == 0:
        raise RekindleError(f"{guest.name}: fio moved nothing: {command}")
    # The job's runtime also has the wait for the disk at the end, which the runtime of the writes may miss.
    took_ms = max(counters["runtime"], job.get("job_runtime", 0))
    return counters["io_bytes"], took_ms * 1000


def settle(guest: CacheGuest) -> None:
    """Writes back all dirty data of the guest, and keeps the guest's kernel from writing back by itself."""
    guest.ssh(
        "sync; sysctl -q vm.dirty_ratio=90 vm.dirty_background_ratio=80 vm.dirty_expire_centisecs=360000"
        " vm.dirty_writeback_centisecs=0"
    )


@dataclass(frozen=True)
class Measurement:
    """The measurement of one guest in one case; appends the rows."""

    env: CacheEnvironment
    guest: CacheGuest
    case: str
    limit: str
    """Name of the disk's limit."""

    def repeat(self, access: FileAccess, rounds: int, ways: tuple[str, ...] = (WARM, COLD)) -> None:
        """Accesses the file around a reboot of each way, for `rounds` rounds."""
        for round_number in range(rounds):
            for how in turns(round_number, ways):
                self.around_reboot(access, how, round_number)
            self.env.log(f"{self.case}: {self.limit}: {access.what} of {access.block}, {round_number + 1} of {rounds}")

    def around_reboot(self, access: FileAccess, how: str, round_number: int) -> None:
        """Accesses the file twice before a reboot and twice after it; appends rows, one with the host's peak memory."""
        self._access(access, how, round_number, index=-2)
        self._access(access, how, round_number, index=-1)
        with Watch(self.guest.name, self.env.ram_dir) as watch:
            report = self.env.reboot(self.guest, WARM if how == WARM else COLD)
            settle(self.guest)
            self._access(access, how, round_number, index=1)
        self.append_memory(watch, how, round_number, report.get("steps", []))
        self._access(access, how, round_number, index=2)

    def _access(self, access: FileAccess, how: str, round_number: int, index: int) -> None:
        """Accesses the file once, and appends the row. `index`: as in `Row.at`."""
        moved_bytes, duration_us = fio(self.guest, access.what, access.block, access.mib)
        self._append(access.what, how, round_number, at=index, block=access.block, bytes=moved_bytes, us=duration_us)
        if "write" in access.what:
            self.guest.ssh("sync")

    def append_memory(self, watch: Watch, how: str, round_number: int, steps: object) -> None:
        """Appends a row with the host's memory at its peak."""
        self._append(
            "memory",
            how,
            round_number,
            bytes=self.env.from_retained_cache(self.guest) if self.guest.cache == "server" else None,
            ram_kib=watch.ram_kib,
            private_kib=watch.private_kib,
            code_kib=watch.code_kib,
            cached_kib=cached_kib(self.guest.disk) if self.guest.disk else None,
            steps=steps if isinstance(steps, list) else [],
        )

    def _append(self, what: str, how: str, round_number: int, **columns: Any) -> None:  # noqa: ANN401
        row = Row(
            case=self.case,
            what=what,
            how=how,
            limit=self.limit,
            round=round_number,
            memory_mib=self.guest.memory_mib,
            **columns,
        )
        self.env.rows.append(row)


def files(is_part: Callable[[FileAccess], bool], limit_index: int = 0) -> Callable[[CacheEnvironment, Plan], None]:
    """Returns a case of figures 5 to 7: a guest is rebooted with its cache and cold, by turns.

    `is_part`: selects among the plan's accesses. `limit_index`: index of one of the plan's limits; all but the first
    have fewer rounds.
    """

    def case(env: CacheEnvironment, plan: Plan) -> None:
        accesses = [access for access in plan.files if is_part(access)]
        if not accesses or limit_index >= len(plan.limits):
            raise NotPlannedError
        limit = plan.limits[limit_index]
        with env.on_limited_disk(env.cached("files", plan.memory_mib, 1), limit) as guest:
            settle(guest)
            for access in accesses:
                rounds = access.rounds if limit_index == 0 else min(access.rounds, OTHER_ROUNDS)
                Measurement(env, guest, "files", limit).repeat(access, rounds)

    return case


def folios(env: CacheEnvironment, plan: Plan) -> None:
    """Measures figures 5 to 7 on a file system that caches in large pieces, so that a guest has less work per page."""
    if not plan.folios:
        raise NotPlannedError
    env.limit_rates(None)
    with env.ours(replace(env.cached("folios", plan.memory_mib, 7), data=True)) as guest:
        guest.mount()
        guest.ssh(f"cp /srv/file {guest.file} && sync && umount /mnt && echo 3 >/proc/sys/vm/drop_caches")
        guest.mount()
        with env.limited(plan.limits[0]):
            settle(guest)
            for access in plan.folios:
                Measurement(env, guest, "folios", plan.limits[0]).repeat(access, access.rounds)


def peers(env: CacheEnvironment, plan: Plan) -> None:
    """Measures figures 11 and 12: QEMU has the disk, with the host's cache and without it."""
    if not plan.peers:
        raise NotPlannedError
    limit = plan.limits[0]
    for cache in ("writeback", "none"):
        with env.on_limited_disk(env.cached("peer", plan.memory_mib, 2, cache), limit) as guest:
            settle(guest)
            for access in plan.peers:
                Measurement(env, guest, "peers", limit).repeat(access, access.rounds, (cache,))
