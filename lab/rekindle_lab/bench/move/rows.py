"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_lab.bench.rows import read_rows
from rekindle_lab.peers.migrate import LIVE

STORES = {"move": "tls", "move-local": "disk"}
"""`rekindle move`, and where its checkpoints go: over the loopback as a migration does, or into a folder."""
HOWS = (*STORES, *LIVE, "non-live")
"""Ours; QEMU's live migration with no limit on its bandwidth, by its downtime limit; that of a stopped guest."""

THERE = "there: "
"""Before the name of a step of the other host's restore, which is what `there` consists of."""


@dataclass
class Row:
    """One guest that went from one host to another. Times are microseconds; host times are since 1970."""

    case: str
    memory_mib: int
    load: str
    """What the guest does: `idle`, or `dirty N`: it writes N MB of its memory each second."""
    how: str
    """One of the `HOWS`."""
    store: str
    """For `move`: where its checkpoints went."""
    round: int
    stopped_us: int | None = None
    """From QEMU's STOP here to QEMU's RESUME there."""
    total_us: int | None = None
    """From the command to the guest's running there."""
    whole_us: int | None = None
    """From the command until all of its memory was there: the paper's M_l."""
    pauses_us: int | None = None
    """For `move`: what the guest was stopped for while it ran here, all together."""
    rounds: int | None = None
    last_bytes: int | None = None
    converged: int | None = None
    """For a live migration: whether it came to its end."""
    before_per_s: float | None = None
    """What its service answered, undisturbed."""
    during_per_s: float | None = None
    """From the command until the guest was stopped."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """The rows of a file. Numbers that are not there are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "move")
