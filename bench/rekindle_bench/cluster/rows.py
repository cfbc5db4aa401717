"""The raw rows of this topic."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rekindle_bench.rows import read_rows


@dataclass
class Row:
    """One fault and its outcome. `*_us`: microseconds since 1970."""

    case: str
    """`failover`, `faults`, `held`, `held-off`; `output`, whose rows are no faults."""
    round: int
    kind: str
    """The fault: one of `faults.KINDS`. In `output` the way: one of `output.WAYS`."""
    seed: int
    node: str
    """The affected node; for most kinds the one that ran the VM."""
    lasted_s: float
    """Duration of a temporary fault."""
    at_us: int
    planned: int = 0
    """Planned number of faults of this case."""
    recovered: bool = False
    """Whether the cluster recovered without help, within the deadline, and was watched all the time."""
    trouble: str = ""
    """What did not recover."""
    elsewhere: bool = False
    """Whether another QEMU runs the guest afterwards."""
    fenced_us: int | None = None
    """When fencing had ended the node."""
    running_us: int | None = None
    """When a guest ran again, in another QEMU."""
    answer_us: int | None = None
    """The first answer of that guest to a client."""
    gap_s: float | None = None
    """The longest time without an answer to the client."""
    back: int = 0
    """Ticks of the guest's counter that were lost in total, measured at the first tick in the new QEMU."""
    back_answers: int = 0
    """The same from the client's answers: less, since the guest has counted on until the first of them."""
    beyond: int = 0
    """Those of them that no checkpoint interval explains."""
    overlaps: int = 0
    """Number of times that two guests ran concurrently."""
    interval_s: float | None = None
    """The longest of the last checkpoint intervals before the fault, with the time of a commit."""
    spare_bytes: int | None = None
    """Memory that the other nodes held for the guest before the fault."""
    guest_bytes: int | None = None
    every_s: float | None = None
    """Configured checkpoint interval; none without protection."""
    median_us: float | None = None
    """Median of the round trips in a window of `output`."""
    p99_us: float | None = None
    trips: int | None = None
    per_s: float | None = None
    """Answers per second over `output.MANY` connections, each of which asks again when it is answered."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN."""
    return read_rows(path, Row, "cluster")
