"""Raw rows of the benchmark of `rekindle metrics`."""

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from rekindle_bench.rows import read_rows


@dataclass(kw_only=True)
class Row:
    """One measurement: a window of scrapes, a page load, or a window of scrolling.

    A field is empty if a measurement of its kind has no such value.
    """

    case: str
    """`cost`, `load`, `frames`; see `cases`."""
    round: int
    """Number of the repetition, from 0."""
    guests: int
    """Number of guests of the host."""
    window_us: int | None = None
    """For `cost` and `frames`: length of the window in microseconds."""
    checkpoints: int | None = None
    """For `cost` and `frames`: checkpoints that all guests have committed in the window."""
    cpu_us: int | None = None
    """For `cost`: processor time of all threads of the server in the window, in microseconds."""
    scrapes: int | None = None
    """For `cost`: scrapes in the window."""
    bytes: int | None = None
    """For `cost`: size of the answer to the last scrape."""
    interactive_us: int | None = None
    """For `load`: from the navigation until the page's script is ready for input, in microseconds."""
    complete_us: int | None = None
    """For `load`: from the navigation until all rows are in the page, in microseconds."""
    ready_us: int | None = None
    """For `load`: from the navigation until both are the case and the next frame is drawn, in microseconds."""
    frames_us: list[int] = field(default_factory=list)
    """For `frames`: times between two frames, in microseconds."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `frames_us` stays JSON text."""
    return read_rows(path, Row, "metrics")
