"""Raw rows of the fail-over benchmark."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rekindle_bench.rows import read_rows


@dataclass(kw_only=True)
class Row:
    """One fault and its outcome; or, for the case `output`, the round trips and answers of one way.

    Ticks are those of the guest's counter, one each 50 ms. A guest that continues from a checkpoint counts again from
    the checkpoint's tick: the ticks after it are lost.
    """

    case: str
    """`failover` (kills of the guest's node), `faults` (random ones), `held` (faults with output commit), `held-off`
    (its control: kills without output commit), `output` (the cost of output commit)."""
    round: int
    """Number of the fault, or of the measurement, in its case; from 0."""
    kind: str
    """The fault: one of `faults.KINDS`. For `output`, the way: one of `output.WAYS`."""
    seed: int
    """Seed of a random fault. For a kill or a measurement its number, as in `round`."""
    node: str
    """Node of the fault; for most kinds the one that ran the guest. For faults of the store: the guest's. Empty for
    `output`."""
    lasted_s: float
    """Duration of a temporary fault, or of the measurement of round trips, in s; 0 for a kill."""
    at_us: int
    """When the fault or the measurement began, in microseconds since 1970."""
    planned: int = 0
    """Planned number of rows of this case; for `output`, of each way and interval."""
    recovered: bool = False
    """Whether the cluster recovered without help, within the deadline, and was watched all the time."""
    trouble: str = ""
    """Why `recovered` is false; empty otherwise."""
    elsewhere: bool = False
    """Whether another QEMU runs the guest after the fault."""
    fenced_us: int | None = None
    """When fencing had ended the node, in microseconds since 1970; `None` if it was not fenced."""
    running_us: int | None = None
    """When the guest ran in another QEMU, in microseconds since 1970; `None` if it stayed in its QEMU."""
    answer_us: int | None = None
    """When the client got the first answer after `running_us` (or, without another QEMU, after the fault), in
    microseconds since 1970."""
    gap_s: float | None = None
    """The client's longest time without an answer, in s."""
    back: int = 0
    """Lost ticks, from the first tick that the guest counted in the new QEMU."""
    back_answers: int = 0
    """Lost ticks, from the client's answers. At most `back`: by its first answer the guest has counted further."""
    beyond: int = 0
    """Lost ticks beyond those that are allowed: those of one checkpoint interval, or none for `held`, `held-off`."""
    overlaps: int = 0
    """Number of times that two QEMUs ran the guest concurrently."""
    interval_s: float | None = None
    """Longest of the latest checkpoint intervals before the fault plus longest commit, in s."""
    spare_bytes: int | None = None
    """Memory that the other nodes used for the guest before the fault, in bytes."""
    guest_bytes: int | None = None
    """RAM of the guest, in bytes."""
    every_s: float | None = None
    """Configured checkpoint interval, in s; `None` without checkpoints."""
    median_us: float | None = None
    """For `output`: median of the round trips, in microseconds."""
    p99_us: float | None = None
    """For `output`: 99th percentile of the round trips, in microseconds."""
    trips: int | None = None
    """For `output`: number of round trips."""
    per_s: float | None = None
    """For `output`: answers per second over `output.RATE_CONNECTIONS` connections."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN."""
    return read_rows(path, Row, "cluster")
