"""Raw rows of the checkpoint benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

DEFAULT = "default"
"""Name of the way in which Rekindle runs without `--policy`."""
POLICIES = (DEFAULT, "cow", "basic")
"""How a checkpoint gets the dirty pages. `basic`: while the guest is stopped. `cow`: later, each page before the guest
writes it. `default`: the policy that `rekindle protect` chooses."""


@dataclass(kw_only=True)
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
    """Configured interval between checkpoints."""
    rate_mb: float | None = None
    """For `rates`: MB that the guest writes per second."""
    number: int | None = None
    """Number of the checkpoint, as the protector counts."""
    full: int | None = None
    """1 if the checkpoint has all memory, 0 if only what was written since the last one."""
    stopped_us: int | None = None
    """Guest-stopped time of the checkpoint or save."""
    stop_host_us: int | None = None
    interval_ms: int | None = None
    """Actual interval since the last checkpoint."""
    dirty_bytes: int | None = None
    """Size of the pages that may have changed since the last checkpoint."""
    copied_stopped_bytes: int | None = None
    """Bytes that were copied while the guest was stopped."""
    copied_for_writes: int | None = None
    """Pages that were copied because the guest was about to write them (policy `cow`)."""
    pages_stored: int | None = None
    """Pages that were stored with their content; the others were zero or had not changed."""
    pages_zero: int | None = None
    pages_unchanged: int | None = None
    compressed_bytes: int | None = None
    """Size of the stored pages after compression."""
    bytes: int | None = None
    """Bytes written to the store; for `save` and `dd`, to the file."""
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
    """For `compare`: pages of memory that were compared with the newest checkpoint."""
    written_since: int | None = None
    """Pages that were not compared, since the guest has written them after the checkpoint."""
    wrong: int | None = None
    """Compared pages that differ: a restore would load wrong content."""
    named: str = ""
    """The first of the wrong pages."""
    digest: str = ""
    """Digest of a window's result: equal for the same work."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the checkpoint, each with `step` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "protect")
