"""The raw rows of this topic."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rekindle_lab.bench.rows import read_rows


@dataclass
class Row:
    """One fault and what came of it. `*_us`: microseconds since 1970."""

    case: str
    """`failover`, `faults`, `held`, `held-off`; `output`, whose rows are no faults."""
    round: int
    kind: str
    """What was done: one of `faults.KINDS`. In `output` what was measured: one of `output.WAYS`."""
    seed: int
    node: str
    """To which node; where the VM ran, for most of them."""
    lasted_s: float
    """How long it was so, where it passes."""
    at_us: int
    planned: int = 0
    """So many of this case there are to be."""
    recovered: bool = False
    """Whether all was well again by itself, within the deadline, and was watched all the time."""
    trouble: str = ""
    """What was not, in words."""
    elsewhere: bool = False
    """Whether another QEMU has the guest afterwards."""
    fenced_us: int | None = None
    """When the switch had ended the node."""
    running_us: int | None = None
    """When a guest ran again, in another QEMU."""
    answer_us: int | None = None
    """The first answer to a client of it."""
    gap_s: float | None = None
    """The longest silence that a client heard."""
    back: int = 0
    """Ticks of the guest's counter that were taken back, together: from the first tick in the new QEMU."""
    back_answers: int = 0
    """The same as the client's answers show it: less, for the guest has counted on until the first of them."""
    beyond: int = 0
    """Those of them that no checkpoint interval explains."""
    overlaps: int = 0
    """Moments with two running guests."""
    interval_s: float | None = None
    """The longest of the last checkpoint intervals before, with the time of a commit."""
    spare_bytes: int | None = None
    """Memory that the nodes without the guest held for it before."""
    guest_bytes: int | None = None
    every_s: float | None = None
    """From one checkpoint to the next, as it was asked for; none without protection."""
    median_us: float | None = None
    """Of the round trips of a window of `output`."""
    p99_us: float | None = None
    trips: int | None = None
    per_s: float | None = None
    """Answers a second over `output.MANY` connections, each of which asks again when it is answered."""


def read(path: Path) -> pd.DataFrame:
    """The rows of a file. Numbers that are not there are NaN."""
    return read_rows(path, Row, "cluster")
