"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd

from rekindle_bench.rows import read_rows

Outcome = Literal["crashed", "hung", "stalled", "went on", "died"]
OUTCOMES: tuple[Outcome, ...] = ("crashed", "hung", "stalled", "went on", "died")
"""State of the guest before it was rebooted; docs/fault-experiment.md."""


@dataclass
class Row:
    """One run: faults, a warm-cache reboot, and a comparison of every block."""

    kind: str
    of_class: str
    checked: int
    """0: the server was built with `unchecked-attic`."""
    block: int
    seed: int
    put: int = 0
    """Number of injected faults."""
    outcome: str = ""
    way: str = ""
    """How it was rebooted: `watch` (Rekindle by itself), `host` (`rekindle reboot os`), `recover`."""
    oops: int = 0
    """Whether the guest's kernel complained on the console."""
    kept: int | None = None
    """Blocks that the retained cache could have when the guest began to boot."""
    served: int | None = None
    refused: int | None = None
    overwritten: int | None = None
    dropped: int | None = None
    compared: int | None = None
    """Blocks that were read from the guest."""
    wrong: int | None = None
    """Blocks of those that differ from the disk."""
    where: list[int] = field(default_factory=list)
    """The first of them."""
    hit: list[int] = field(default_factory=list)
    """Blocks whose page-cache frames were damaged, where known: only faults from outside that target them."""
    hit_wrong: int | None = None
    """How many of those were wrong."""
    us: int | None = None
    """Duration of the run."""
    note: str = ""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `where` stays JSON text."""
    return read_rows(path, Row, "faults")
