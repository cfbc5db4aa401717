"""Raw rows of the object store benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

STORES = ("s3", "tls")
"""Kinds of store from which a guest was restored: an object store and, in earlier rows, a server of Rekindle."""


@dataclass(kw_only=True)
class Row:
    """One measurement: a commit or PUT, a restore, or a race.

    A field is empty if a measurement of its kind has no such value.
    """

    case: str
    """`commit`, `restore`, `owners`; see `cases`."""
    how: str
    """For `commit`: `s3` (a commit) or `put` (a plain PUT). For `restore`: a member of `STORES`. For `owners`: `claim`
    (two hosts claim a store) or `commit` (a host claims it while its owner commits)."""
    round: int
    """Number of the repetition, from 0; rows with the same number were measured by turns."""
    took_us: int | None = None
    """Duration in microseconds: of a commit with its pages, of a PUT, of a race; of a restore from the command until
    the guest runs."""
    bytes: int | None = None
    """For `commit`: bytes that were written."""
    fill_us: int | None = None
    """For `restore`: from when the guest runs until all of its memory is loaded, in microseconds."""
    worst_us: int | None = None
    """For `restore`: the longest time that the guest waited for a page, in microseconds."""
    owners: int | None = None
    """For `owners`: number of hosts that were the owner at the same time; empty if an error leaves it unknown."""
    error: str = ""
    """For `owners`: an error of a host other than that it has lost."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For `restore`: steps, each with `step`, `start_host_us` (microseconds since 1970) and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "store")
