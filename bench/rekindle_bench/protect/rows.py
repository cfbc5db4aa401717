"""Raw rows of the checkpoint benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

DEFAULT = "default"
"""Name of the way in which Rekindle runs without `--policy`."""
POLICIES = (DEFAULT, "cow", "basic")
"""How a checkpoint copies the dirty pages.

- `basic`: while the guest is stopped.
- `cow`: later, each page before the guest writes it.
- `default`: by the policy that `rekindle protect` chooses.
"""
PLAIN = "disk"
ENCRYPTED = "encrypted"
"""Kinds of the stores that are compared by the case `encryption`: folders on the same disk."""


@dataclass(kw_only=True)
class Row:
    """One measurement: a checkpoint, or one of the other kinds of `what`.

    Names end in the unit. A field is empty if a measurement of its kind has no such value.
    """

    case: str
    """`pause`, `intervals`, `slowdown`, `rates`, `commit`, `encryption`, `wrong`; see `cases`."""
    what: str
    """Kind of the measurement: `checkpoint`; `window` (a piece of work, with or without checkpoints during it); `save`
    (by a peer); `dd` (a plain write of a file); `compare` (of memory with the newest checkpoint)."""
    memory_mib: int
    """RAM of the guest, in MiB."""
    workload: str
    """What the guest does: `compile`, `transcode`, `dirty` (it writes `rate_mb`), `idle`."""
    store: str
    """Kind of the store: `disk`, `slow`, `s3`, `encrypted`; empty for a window without protection."""
    how: str
    """A policy of Rekindle (`POLICIES`), a peer, or `none` without protection."""
    round: int
    """Number of the repetition, from 0; rows with the same number were measured by turns. In `intervals`: number of the
    combination of store, workload and policy."""
    every_s: float | None = None
    """Configured interval between checkpoints, in s."""
    rate_mb: float | None = None
    """For the case `rates`: MB of its memory that the guest writes per second."""
    number: int | None = None
    """Number of the checkpoint, as the protector counts."""
    full: int | None = None
    """1 if the checkpoint has all memory, 0 if only what was written since the last one."""
    stopped_us: int | None = None
    """Guest-stopped time of the checkpoint or save, in microseconds."""
    stop_host_us: int | None = None
    """When the guest was stopped for it, in microseconds since 1970 by the host's clock."""
    interval_ms: int | None = None
    """Actual interval since the last checkpoint, in ms."""
    dirty_bytes: int | None = None
    """Size of the pages that may have changed since the last checkpoint, in bytes."""
    copied_stopped_bytes: int | None = None
    """Bytes that were copied while the guest was stopped."""
    copied_for_writes: int | None = None
    """Number of pages that were copied because the guest was about to write them (policy `cow`)."""
    pages_stored: int | None = None
    """Number of dirty pages that were stored with their content."""
    pages_zero: int | None = None
    """Number of dirty pages that had only zeros."""
    pages_unchanged: int | None = None
    """Number of dirty pages whose content was that of the last checkpoint."""
    compressed_bytes: int | None = None
    """Size of the stored pages after compression, in bytes."""
    bytes: int | None = None
    """Bytes written to the store; for `save` and `dd`, to the file."""
    commit_us: int | None = None
    """From the guest's resume to the commit, in microseconds."""
    took_us: int | None = None
    """Duration of the checkpoint, or of the peer's command, in microseconds."""
    units: int | None = None
    """For `window`: number of files or frames."""
    window_us: int | None = None
    """For `window`: duration of the work, in microseconds."""
    checkpoints: int | None = None
    """For `window`: number of commits during the work."""
    cpu_us: int | None = None
    """For `window`: processor time of the protector, also for the first checkpoint before the work, in microseconds."""
    peak_kib: int | None = None
    """For `window`: peak resident memory of the protector, in KiB."""
    pages: int | None = None
    """For `compare`: number of pages that were compared with the newest checkpoint."""
    written_since: int | None = None
    """For `compare`: number of pages that were not compared, since the guest has written them after the checkpoint."""
    wrong: int | None = None
    """For `compare`: number of pages that differ, so that a restore would load wrong content."""
    named: str = ""
    """For `compare`: the first of the pages that differ."""
    digest: str = ""
    """For `window`: digest of the result; equal for the same work."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the checkpoint, each with `step` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "protect")
