"""Raw rows of the move benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows
from rekindle_lab.peers.migrate import LIVE

STORES = {"move": "s3", "move-local": "disk"}
"""The ways of `rekindle move`, and the store of each: `s3` over the loopback as a migration, `disk` in a folder."""
HOWS = (*STORES, *LIVE, "non-live")
"""The ways of Rekindle; QEMU's live migrations with unlimited bandwidth, by downtime limit; QEMU's non-live one."""

THERE = "there: "
"""Prefix of the restore's steps on the destination host."""


@dataclass(kw_only=True)
class Row:
    """One move of a guest from one host to another."""

    case: str
    """`moves`."""
    memory_mib: int
    """RAM of the guest, in MiB."""
    load: str
    """Load of the guest: `idle`, or `dirty N` (the guest writes N MB of its memory per second)."""
    how: str
    """A member of `HOWS`."""
    store: str
    """The store of the checkpoints of `rekindle move`; empty for a peer."""
    round: int
    """Number of the repetition of this size, load and way; from 0."""
    stopped_us: int | None = None
    """From the source QEMU's STOP to the destination QEMU's RESUME, in microseconds."""
    total_us: int | None = None
    """From the command until the guest runs in the destination, in microseconds."""
    whole_us: int | None = None
    """From the command until all memory is in the destination, in microseconds: the paper's M_l."""
    pauses_us: int | None = None
    """For `rekindle move`: total guest-stopped time while the guest still ran in the source, in microseconds."""
    rounds: int | None = None
    """For `rekindle move`: number of checkpoints."""
    last_bytes: int | None = None
    """For `rekindle move`: size of the last checkpoint, in bytes. The guest is stopped until its end."""
    converged: int | None = None
    """For a live migration: 1 if it completed, else 0."""
    before_per_s: float | None = None
    """Answers of the guest's service per second before the move."""
    during_per_s: float | None = None
    """Answers of the guest's service per second from the command until the guest was stopped."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of `rekindle move`, each with `step` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "move")
