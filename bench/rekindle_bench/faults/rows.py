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
    """Class of the type: `kinds.Kind.of_class`."""
    checked: int
    """1 if the disk server checks digests; 0 if it was built without that (feature `unchecked-attic`)."""
    block: int
    """Number of the repetition. A repetition has one run of each type."""
    seed: int
    """Seed of the guest's load."""
    put: int = 0
    """Number of injected faults."""
    outcome: str = ""
    """State of the guest before its reboot: one of `OUTCOMES`."""
    way: str = ""
    """Way of the reboot: `watch` (automatically), `host` (`rekindle reboot`), `recover`."""
    oops: int = 0
    """1 if the guest's kernel has reported an error on the console, else 0."""
    kept: int | None = None
    """Number of blocks in the retained cache when the guest began to boot."""
    served: int | None = None
    """Number of blocks of the retained cache that the server returned to the guest."""
    refused: int | None = None
    """Number of blocks of the retained cache whose digest was wrong, so that the server read them from the disk."""
    overwritten: int | None = None
    """Number of blocks of the retained cache that the guest has written before it read them."""
    dropped: int | None = None
    """Number of blocks of the retained cache that the server has dropped."""
    compared: int | None = None
    """Number of blocks that were read from the guest and compared with the disk."""
    wrong: int | None = None
    """Number of compared blocks that differ from the disk."""
    where: list[int] = field(default_factory=list)
    """Numbers of the first blocks that differ from the disk."""
    hit: list[int] = field(default_factory=list)
    """Numbers of the blocks whose page-cache frames were damaged; known only for faults from outside the guest that
    target such frames."""
    hit_wrong: int | None = None
    """Number of damaged blocks (`hit`) that differ from the disk."""
    us: int | None = None
    """Duration of the run, in microseconds."""
    note: str = ""
    """The error that ended the run, or a remark on it."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `where` stays JSON text."""
    return read_rows(path, Row, "faults")
