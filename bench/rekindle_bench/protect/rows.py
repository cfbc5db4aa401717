"""Raw rows of the checkpoint benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

DEFAULT = "default"
"""Name of the way in which Rekindle runs without `--policy`."""
POLICIES = (DEFAULT, "cow", "basic")


@dataclass
class Row:
    """One measurement. Names end in the unit; `*_host_us` is microseconds since 1970 by the host's clock."""

    case: str
    """`pause`, `intervals`, `slowdown`, `rates`, `commit`, `wrong`."""
    what: str
    """`checkpoint`, `window` (a piece of work, with or without checkpoints during it), `save` (by a peer), `dd`,
    `compare`."""
    memory_mib: int
    workload: str
    """`compile`, `transcode`, `dirty` (with `rate_mb`), `idle`."""
    store: str
    """`disk`, `slow`, `tls`; empty for a window without protection."""
    how: str
    """A policy of Rekindle, `none`, or a peer."""
    round: int
    """Rows of one case with the same round were measured by turns; in `intervals`, a round is a cell of the table."""
    every_s: float | None = None
    rate_mb: float | None = None
    number: int | None = None
    full: int | None = None
    stopped_us: int | None = None
    stop_host_us: int | None = None
    interval_ms: int | None = None
    dirty_bytes: int | None = None
    copied_stopped_bytes: int | None = None
    copied_for_writes: int | None = None
    pages_stored: int | None = None
    pages_zero: int | None = None
    pages_unchanged: int | None = None
    compressed_bytes: int | None = None
    bytes: int | None = None
    commit_us: int | None = None
    """From the guest's resume to the commit."""
    took_us: int | None = None
    """From the start of the checkpoint to its end; for `save`, from the start of the command."""
    units: int | None = None
    """Files or frames of a window."""
    window_us: int | None = None
    checkpoints: int | None = None
    """Commits within the window."""
    cpu_us: int | None = None
    """Processor time of the protector over the window and its first checkpoint."""
    peak_kib: int | None = None
    """Peak resident memory of the protector."""
    pages: int | None = None
    written_since: int | None = None
    wrong: int | None = None
    named: str = ""
    digest: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "protect")
