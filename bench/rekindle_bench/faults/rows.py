"""Raw rows of the fault experiment."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pandas as pd

from rekindle_bench.rows import read_rows

Outcome = Literal["crashed", "hung", "stalled", "went on", "died"]
OUTCOMES: tuple[Outcome, ...] = ("crashed", "hung", "stalled", "went on", "died")
"""State of the guest before its reboot; docs/fault-experiment.md defines the outcomes."""


@dataclass(kw_only=True)
class Row:
    """One run: faults, a warm-cache reboot, and a comparison of every block."""

    kind: str
    """Type of the faults: `kinds.Kind.name`."""
    of_class: str
    checked: int
    """1: the server checks digests; 0: the server was built with `unchecked-attic`."""
    block: int
    """Number of the set of runs that has each type once."""
    seed: int
    """Seed of the guest's load."""
    put: int = 0
    """Number of injected faults."""
    outcome: str = ""
    way: str = ""
    """Way of the reboot: `watch` (automatically), `host` (`rekindle reboot os`), `recover`."""
    oops: int = 0
    """1 if the guest's kernel has reported an error on the console, else 0."""
    kept: int | None = None
    """Blocks that the retained cache could have when the guest began to boot."""
    served: int | None = None
    """Of these: blocks that the server returned to the guest."""
    refused: int | None = None
    """Of these: blocks that the server read from the disk, since their digest was wrong."""
    overwritten: int | None = None
    """Of these: blocks that the guest has written before it read them."""
    dropped: int | None = None
    compared: int | None = None
    """Blocks that were read from the guest."""
    wrong: int | None = None
    """Compared blocks that differ from the disk."""
    where: list[int] = field(default_factory=list)
    """The first of the blocks that differ."""
    hit: list[int] = field(default_factory=list)
    """Blocks whose page-cache frames were damaged; known only for faults from outside that target such frames."""
    hit_wrong: int | None = None
    """Damaged blocks (`hit`) that differ from the disk."""
    us: int | None = None
    """Duration of the run in microseconds."""
    note: str = ""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `where` stays JSON text."""
    return read_rows(path, Row, "faults")
