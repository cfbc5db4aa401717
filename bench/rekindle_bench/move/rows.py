"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows
from rekindle_lab.peers.migrate import LIVE

STORES = {"move": "tls", "move-local": "disk"}
"""`rekindle move`, and the way of its checkpoints: over the loopback as a migration, or into a folder."""
HOWS = (*STORES, *LIVE, "non-live")
"""Rekindle's; QEMU's live migration with unlimited bandwidth, by its downtime limit; QEMU's of a stopped guest."""

THERE = "there: "
"""Prefix of the steps of the restore on the other host, which `there` consists of."""


@dataclass
class Row:
    """One move of a guest from one host to another. Times are microseconds; host times are since 1970."""

    case: str
    memory_mib: int
    load: str
    """The load of the guest: `idle`, or `dirty N`: it writes N MB of its memory per second."""
    how: str
    """One of the `HOWS`."""
    store: str
    """For `move`: where its checkpoints were stored."""
    round: int
    stopped_us: int | None = None
    """From QEMU's STOP here to QEMU's RESUME there."""
    total_us: int | None = None
    """From the command until the guest runs there."""
    whole_us: int | None = None
    """From the command until all of its memory is there: the paper's M_l."""
    pauses_us: int | None = None
    """For `move`: total guest-stopped time while it still ran here."""
    rounds: int | None = None
    last_bytes: int | None = None
    converged: int | None = None
    """For a live migration: whether it completed."""
    before_per_s: float | None = None
    """Service rate, undisturbed."""
    during_per_s: float | None = None
    """From the command until the guest was stopped."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "move")
