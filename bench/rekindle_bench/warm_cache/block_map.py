"""The case of figures 8 to 10: what the block map costs without reboots."""

from rekindle_lab import guests

from . import native
from .cache_guests import CacheEnvironment
from .file_access import fio
from .plan import Plan
from .rows import Row
from .ways import turns

MEMORY_MIB = 768
KINDS = (("read", 4096, ()), ("write", 4096, ("--end_fsync=1",)), ("bytes", 1, ("--end_fsync=1",)))
"""Kinds of access, each with its block size and further options of fio."""


def map_cost(env: CacheEnvironment, plan: Plan) -> None:
    """Measures two guests by turns. The server of the one keeps a block map. All accesses reach the disk."""
    if env.slow:
        env.limit_rates(None)
    image = env.image("debian-cache")
    disks = {how: env.disk_dir / f"{how}.raw" for how in ("map", "no-map")}
    try:
        for disk in disks.values():
            guests.copy_sparse(image.folder / "disk.raw", disk)
        with (
            native.ours(env, disks["map"], "map", "--queues=1") as with_map,
            native.ours(env, disks["no-map"], "nomap", "--queues=1", "--no-map") as without_map,
            env.ours(env.cached("with", MEMORY_MIB, 3, str(with_map.socket))) as mapped,
            env.ours(env.cached("without", MEMORY_MIB, 4, str(without_map.socket))) as unmapped,
        ):
            both = {"map": (mapped, with_map), "no-map": (unmapped, without_map)}
            for number in range(plan.map_rounds):
                for what, block, options in KINDS:
                    for how in turns(number, ("map", "no-map")):
                        guest, server = both[how]
                        # Written data stays cached, as in the paper: only then does a write of one byte per page
                        # not read the page first.
                        guest.ssh("sync" + ("; echo 3 >/proc/sys/vm/drop_caches" if what == "read" else ""))
                        before_us = server.used_us()
                        moved, took_us = fio(guest, what, block, plan.map_mib, *options)
                        columns = {"bytes": moved, "us": took_us, "cpu_us": server.used_us() - before_us}
                        row = Row("map", what, how, "none", number, memory_mib=MEMORY_MIB, block=block, **columns)
                        env.rows.append(row)
                env.log(f"map: {number + 1} of {plan.map_rounds}")
    finally:
        for disk in disks.values():
            disk.unlink(missing_ok=True)
