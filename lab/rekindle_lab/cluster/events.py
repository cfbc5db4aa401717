"""Reads the events of a test bed: faults of nodes and of the store, and actions of the power switch.

Needs only Python itself.
"""

from pathlib import Path
from typing import NamedTuple


class BedEvent(NamedTuple):
    """One event; `s`: seconds since 1970; `text`: `kill n1`, `switch off n1 rc=0`, `n1 on`, ..."""

    s: float
    text: str

    @property
    def host_us(self) -> int:
        """Time of the event in microseconds since 1970."""
        return round(self.s * 1e6)


def read_events(bed: Path) -> list[BedEvent]:
    """Reads the events of the test bed in the folder `bed`, in the order of time."""
    lines = (bed / "shared" / "events").read_text().splitlines()
    return [BedEvent(float(seconds), text) for seconds, text in (line.split(" ", 1) for line in lines)]
