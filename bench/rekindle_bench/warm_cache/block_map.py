"""The case of figures 8 to 10: what the block map costs without reboots."""

from dataclasses import dataclass

from rekindle_lab import guests

from . import native
from .cache_guests import CacheEnvironment, CacheGuest
from .file_access import fio
from .plan import Plan
from .rows import Row
from .ways import turns

MEMORY_MIB = 768
"""RAM of both guests."""


@dataclass(frozen=True)
class Access:
    """A kind of access to the file."""

    what: str
    """As in `Row.what`."""
    block: int
    """Size of a request, in bytes."""
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
            guests_and_servers = {"map": (mapped, with_map), "no-map": (unmapped, without_map)}
            for round_number in range(plan.map_rounds):
                for access in ACCESSES:
                    for how in turns(round_number, tuple(guests_and_servers)):
                        guest, server = guests_and_servers[how]
                        row = _measure_access(guest, server, access, plan.map_mib)
                        row.how, row.round = how, round_number
                        env.rows.append(row)
                env.log(f"map: {round_number + 1} of {plan.map_rounds}")
    finally:
        for disk in disks.values():
            disk.unlink(missing_ok=True)


def _measure_access(guest: CacheGuest, server: native.Server, access: Access, file_mib: int) -> Row:
    """Accesses the file, and returns the row without way and round."""
    # Written data stays cached, as in the paper: only then does a write of one byte per page not read the page first.
    guest.ssh("sync; echo 3 >/proc/sys/vm/drop_caches" if access.what == "read" else "sync")
    cpu_before_us = server.used_us()
    moved_bytes, duration_us = fio(guest, access.what, access.block, file_mib, *access.options)
    return Row(
        case="map",
        what=access.what,
        how="",
        limit="none",
        round=0,
        memory_mib=MEMORY_MIB,
        block=access.block,
        bytes=moved_bytes,
        us=duration_us,
        cpu_us=server.used_us() - cpu_before_us,
    )
