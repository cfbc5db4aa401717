"""Raw rows of the fail-over benchmark."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rekindle_bench.rows import read_rows


@dataclass(kw_only=True)
class Row:
    """One fault and its outcome. `*_us`, if a point in time: microseconds since 1970."""

    case: str
    """`failover`, `faults`, `held` (faults with output commit) or `held-off` (its control without output commit);
    `output`, whose rows are windows, not faults."""
    round: int
    kind: str
    """The fault: one of `faults.KINDS`. For `output`, the way: one of `output.WAYS`."""
    seed: int
    """Seed of a random fault, or the number of a kill."""
    node: str
    """The affected node; for most kinds the node that ran the VM."""
    lasted_s: float
    """Duration of a temporary fault, in s."""
    at_us: int
    """When the fault began; for `output`, the window."""
    planned: int = 0
    """Planned number of faults of this case."""
    recovered: bool = False
    """Whether the cluster recovered without help, within the deadline, and was watched all the time."""
    trouble: str = ""
    """Why the cluster did not recover."""
    elsewhere: bool = False
    """Whether another QEMU runs the guest after the fault."""
    fenced_us: int | None = None
    """When fencing had ended the node."""
    running_us: int | None = None
    """When the guest ran again, in another QEMU."""
    answer_us: int | None = None
    """When the first answer of the new QEMU's guest reached a client."""
    gap_s: float | None = None
    """The client's longest time without an answer, in s."""
    back: int = 0
    """Total of lost ticks of the guest's counter, measured at the first tick in the new QEMU."""
    back_answers: int = 0
    """Lost ticks computed from the client's answers: at most `back`, since the guest counts until its first answer."""
    beyond: int = 0
    """Lost ticks that no checkpoint interval explains."""
    overlaps: int = 0
    """Number of times that two guests ran concurrently."""
    interval_s: float | None = None
    """The longest of the latest checkpoint intervals before the fault, with the time of a commit, in s."""
    spare_bytes: int | None = None
    """Memory that the other nodes held for the guest before the fault."""
    guest_bytes: int | None = None
    """RAM of the guest."""
    every_s: float | None = None
    """Configured checkpoint interval in s; `None` without protection."""
    median_us: float | None = None
    """Median of the round trips in a window of `output`."""
    p99_us: float | None = None
    trips: int | None = None
    """Number of these round trips."""
    per_s: float | None = None
    """Answers per second over `output.MANY` connections, each of which sends its next request after an answer."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN."""
    return read_rows(path, Row, "cluster")
