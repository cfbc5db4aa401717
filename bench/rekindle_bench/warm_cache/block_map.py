"""The case of figures 8 to 10: what the block map costs without reboots."""

from dataclasses import dataclass

from rekindle_lab import guests

from . import native
from .cache_guests import CacheEnvironment
from .file_access import fio
from .plan import Plan
from .rows import Row
from .ways import turns

MEMORY_MIB = 768


@dataclass(frozen=True)
class Access:
    """A kind of access to the file."""

    what: str
    block: int
    options: tuple[str, ...] = ()
    """Further options of fio."""


ACCESSES = (
    Access("read", 4096),
    Access("write", 4096, ("--end_fsync=1",)),
    Access("bytes", 1, ("--end_fsync=1",)),
)


def map_cost(env: CacheEnvironment, plan: Plan) -> None:
    """Measures two guests by turns. The server of only one of them keeps a block map. All accesses reach the disk."""
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
            for round_number in range(plan.map_rounds):
                for access in ACCESSES:
                    for how in turns(round_number, ("map", "no-map")):
                        guest, server = both[how]
                        # Written data stays cached, as in the paper: only then does a write of one byte per page
                        # not read the page first.
                        guest.ssh("sync" + ("; echo 3 >/proc/sys/vm/drop_caches" if access.what == "read" else ""))
                        before_us = server.used_us()
                        moved, took_us = fio(guest, access.what, access.block, plan.map_mib, *access.options)
                        columns = {"bytes": moved, "us": took_us, "cpu_us": server.used_us() - before_us}
                        row = Row(
                            case="map",
                            what=access.what,
                            how=how,
                            limit="none",
                            round=round_number,
                            memory_mib=MEMORY_MIB,
                            block=access.block,
                            **columns,
                        )
                        env.rows.append(row)
                env.log(f"map: {round_number + 1} of {plan.map_rounds}")
    finally:
        for disk in disks.values():
            disk.unlink(missing_ok=True)
