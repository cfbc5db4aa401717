"""Raw rows of the restore benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("lazy", "prepared", "eager", "incoming", "elsewhere", "libvirt")
"""`lazy`: `rekindle restore`. `prepared`: into a prepared QEMU. `eager`: all memory is loaded first. `incoming`: QEMU's
own load of a full save. `elsewhere`: into another run directory and network namespace. `libvirt`: as `elsewhere`, of a
guest that libvirt had started."""


@dataclass(kw_only=True)
class Row:
    """One measurement. Names end in the unit; host times in `steps` are microseconds since 1970."""

    case: str
    """`restore`, `prepared`, `after`, `stores`, `elsewhere`."""
    what: str
    """`restore`, or `window`: the rest of a piece of work."""
    memory_mib: int
    workload: str
    """What the guest did at its checkpoint: `compile`, `transcode`."""
    store: str
    """`disk`, `slow`, `tls`."""
    how: str
    """A member of `HOWS`, or `undisturbed` for a window."""
    round: int
    """In `elsewhere`, windows of Rekindle's guest have 0, those of libvirt's 1."""
    restore_us: int | None = None
    """From the start of the command until the guest runs."""
    told_us: int | None = None
    """`restore_us` as reported by the command itself."""
    fill_us: int | None = None
    """From when the guest runs until all of the guest's memory is loaded."""
    demanded_pages: int | None = None
    """Pages that the guest waited for."""
    filled_pages: int | None = None
    """Pages that were loaded in the background."""
    worst_us: int | None = None
    """The longest that the guest waited for a page."""
    resident_kib: int | None = None
    """Memory that a prepared QEMU and its helpers use while they wait."""
    units: int | None = None
    """Files or frames of a window."""
    position: float | None = None
    """Progress of the work at the checkpoint, in units."""
    rest_us: int | None = None
    """From `position` until the work was done; after a restore, from when the guest runs again."""
    lost_us: int | None = None
    """From the guest's stop for the newest checkpoint until the death of its host."""
    digest: str = ""
    """Digest of the work's result."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "restore")
