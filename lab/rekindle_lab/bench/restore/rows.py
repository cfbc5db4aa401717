"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_lab.bench.rows import read_rows

HOWS = ("lazy", "prepared", "eager", "incoming", "elsewhere", "libvirt")
"""`rekindle restore`; the same into a prepared QEMU; with all memory first; QEMU's own load of a full save; in another
run directory and network namespace; there, of a guest that libvirt had started."""


@dataclass
class Row:
    """One thing that was measured. Names end in the unit; host times are microseconds since 1970."""

    case: str
    """`restore`, `prepared`, `after`, `stores`, `elsewhere`."""
    what: str
    """`restore`, or `window`: the rest of a piece of work."""
    memory_mib: int
    workload: str
    store: str
    how: str
    """One of the `HOWS`; `undisturbed` for a window."""
    round: int
    restore_us: int | None = None
    """From the start of the command to the guest's running."""
    told_us: int | None = None
    """What the command itself says."""
    fill_us: int | None = None
    """From the guest's running until all of its memory was there."""
    demanded_pages: int | None = None
    """Pages that somebody waited for."""
    filled_pages: int | None = None
    """Pages that came behind."""
    worst_us: int | None = None
    """The longest that somebody waited for a page."""
    resident_kib: int | None = None
    """Memory that a prepared QEMU, with what stands by for it, takes while it waits."""
    units: int | None = None
    position: float | None = None
    """How far the work was at the checkpoint."""
    rest_us: int | None = None
    """From there (restored: from the guest's running again) until the work was done."""
    lost_us: int | None = None
    """From the guest's stop for the newest checkpoint until its host died."""
    digest: str = ""
    """Of what the work gave."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """The rows of a file. Numbers that are not there are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "restore")
