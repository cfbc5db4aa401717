"""The raw rows of this topic."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rekindle_lab.bench.rows import read_rows


@dataclass
class Row:
    """One fault and what came of it. `*_us`: microseconds since 1970."""

    case: str
    """`failover`, `faults`."""
    round: int
    kind: str
    """What was done: one of `faults.KINDS`."""
    seed: int
    node: str
    """To which node; where the VM ran, for most of them."""
    lasted_s: float
    """How long it was so, where it passes."""
    at_us: int
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
    """Ticks of the guest's counter that were taken back, together."""
    beyond: int = 0
    """Those of them that no checkpoint interval explains."""
    overlaps: int = 0
    """Moments with two running guests."""
    interval_s: float | None = None
    """The longest of the last checkpoint intervals before, with the time of a commit."""
    spare_bytes: int | None = None
    """Memory that the nodes without the guest held for it before."""
    guest_bytes: int | None = None


def read(path: Path) -> pd.DataFrame:
    """The rows of a file. Numbers that are not there are NaN."""
    return read_rows(path, Row, "cluster")
