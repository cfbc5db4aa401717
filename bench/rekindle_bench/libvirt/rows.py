"""Raw rows of the libvirt benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

FIRST, AGAIN, OWN, MANAGEDSAVE = "first", "again", "own", "managedsave"
"""Ways to replace a QEMU. `first`: of a domain whose QEMU libvirt has started, with private RAM. `again`: of a domain
whose QEMU Rekindle has started. `own`: of a VM of Rekindle's. `managedsave`: the peer, libvirt saves the domain to disk
and starts it again."""
ATTACHED, REPLACED = "attached", "attached-replaced"
"""With `OWN`, the guests of case `pause`: a domain that is attached, and one that was replaced and is attached."""


UNPROTECTED, RAM_ONLY, OVERLAYS = "unprotected", "ram-only", "overlays"
"""Ways of case `overlays`: without a protector, with checkpoints of the RAM, with checkpoints of the disks too."""
INTO_LIBVIRT = "into-libvirt"
"""The way of case `restored`."""
UNTOUCHED, REPLACED_DOMAIN, RESTORED_DOMAIN = "untouched", "replaced", "restored"
"""The domains of case `works`: as libvirt has started it, with a replaced QEMU, and restored from a checkpoint."""


@dataclass(kw_only=True)
class Row:
    """The outcome of a replacement or checkpoint for one guest. `*_host_us`: microseconds since 1970."""

    case: str
    """`first`, `again`, `managedsave`, `away`, `pause`, `works`, `losses`, `overlays`, `epochs`, `restored`."""
    how: str
    """See `FIRST` and `ATTACHED`."""
    memory_mib: int
    guests: int
    """Number of guests that are replaced by one command."""
    round: int
    """Rows with the same case, size and round were measured by turns; of `away`, they belong to one command."""
    vm: str
    """Name of the guest."""
    load_mb: float | None = None
    """MB of its memory that the guest is set to write per second."""
    written_mb: float | None = None
    """MB per second that it has written before the replacement."""
    stopped_us: int | None = None
    """Guest-stopped time: between the next two, or as the protector has reported it."""
    stop_host_us: int | None = None
    resume_host_us: int | None = None
    command_us: int | None = None
    """Duration of the command as measured by its caller."""
    gap_us: int | None = None
    """The client's longest time without an answer around the replacement; the next two fields are its bounds."""
    gap_start_host_us: int | None = None
    gap_end_host_us: int | None = None
    answered: int | None = None
    """Requests of the client that were answered; `failed` of the others were not."""
    failed: int | None = None
    away_us: int | None = None
    """Time for which a client of libvirt got no answer: the sum of all absences."""
    longest_away_us: int | None = None
    """The longest absence."""
    absences: int | None = None
    polls: int | None = None
    """Attempts of the client of libvirt."""
    reported_away_us: int | None = None
    """Time for which libvirt's daemon did not answer, according to Rekindle."""
    every_s: float | None = None
    """Interval between checkpoints."""
    number: int | None = None
    """Number of the checkpoint."""
    dirty_bytes: int | None = None
    """Size of the pages that may have changed since the last checkpoint."""
    copied_stopped_bytes: int | None = None
    """Bytes that were copied while the guest was stopped."""
    disks_us: int | None = None
    """Part of `stopped_us` in which the disks got overlays."""
    writes_per_s: float | None = None
    """Writes of 4 KiB to a disk that the guest has done."""
    passes: int | None = None
    """Times that the guest has written and verified its disks; `wrong`: failed verifications, and disks that differ."""
    wrong: int | None = None
    sessions: int | None = None
    """Connections that have been open since before the first replacement; `lost_sessions` of them were lost so far."""
    lost_sessions: int | None = None
    operation: str = ""
    """An operation of libvirt."""
    worked: bool | None = None
    """Whether it worked; `failure`: why not."""
    failure: str = ""
    from_version: str = ""
    """Version of the previous QEMU; `to_version`: of the new one."""
    to_version: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the replacement or checkpoint, each with at least `step` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "libvirt")
