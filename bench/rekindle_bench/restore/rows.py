"""Raw rows of the restore benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("lazy", "prepared", "eager", "incoming", "elsewhere", "libvirt")
"""The ways to restore a guest.

- `lazy`: `rekindle restore`; memory is loaded on demand, while the guest runs.
- `prepared`: the same, into a QEMU that was started before.
- `eager`: `rekindle restore`; all memory is loaded before the guest runs.
- `incoming`: the peer, QEMU's own load of a full save.
- `elsewhere`: as `lazy`, into another run directory and network namespace.
- `libvirt`: as `elsewhere`, of a guest that libvirt had started.
"""


@dataclass(kw_only=True)
class Row:
    """One measurement: a restore, or a piece of work.

    Names end in the unit. A field is empty if a measurement of its kind has no such value.
    """

    case: str
    """`restore`, `prepared`, `after`, `stores`, `elsewhere`; see `cases`."""
    what: str
    """Kind of the measurement: `restore`, or `window` (a piece of work, interrupted by a restore or undisturbed)."""
    memory_mib: int
    """RAM of the guest, in MiB."""
    workload: str
    """What the guest did at its checkpoint: `compile`, `transcode`."""
    store: str
    """Kind of the store: `disk`, `slow`, `s3`."""
    how: str
    """A member of `HOWS`, or `undisturbed` for a window."""
    round: int
    """Number of the repetition, from 0. In `elsewhere`: 0 for windows of Rekindle's guest, 1 for those of libvirt's."""
    restore_us: int | None = None
    """From the start of the command until the guest runs, in microseconds."""
    told_us: int | None = None
    """`restore_us` as reported by the command itself, in microseconds."""
    fill_us: int | None = None
    """From when the guest runs until all of the guest's memory is loaded, in microseconds."""
    demanded_pages: int | None = None
    """Number of pages that the guest waited for."""
    filled_pages: int | None = None
    """Number of pages that were loaded in the background."""
    worst_us: int | None = None
    """The longest time that the guest waited for a page, in microseconds."""
    resident_kib: int | None = None
    """For `prepared`: memory that QEMU and its helpers use while they wait, in KiB."""
    units: int | None = None
    """For `window`: number of files or frames of the whole work."""
    position: float | None = None
    """For `window`: number of units that were finished at the checkpoint."""
    rest_us: int | None = None
    """For `window`: time for the units after `position`, in microseconds; with a restore from when the guest runs
    again."""
    lost_us: int | None = None
    """In `elsewhere`: from the guest's stop for the newest checkpoint until the death of its host, in microseconds."""
    digest: str = ""
    """For `window`: digest of the result; equal for the same work."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For `restore`: steps, each with `step`, `start_host_us` (microseconds since 1970) and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "restore")
