"""Raw data: a CSV file with a row per measurement, written immediately, so that an interrupted run loses nothing.

Each topic has a dataclass `Row` in its module `rows`. A field is a column of the file, and of the pandas data frame in
which an analysis gets the rows. The file is TOPIC-raw.csv; a *sidecar* is a JSON file of the same run next to it.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_lab.stats import median


class RowFile:
    """Appends rows to a file. Lists are written as JSON, `None` as an empty cell."""

    def __init__(
        self, path: Path, kind: type, *, append: bool = False, check: Callable[[Any], list[str]] | None = None
    ) -> None:
        """Opens a new file for rows of the dataclass `kind` or, with `append`, an existing one.

        `check` returns the problems of a row, as text.
        """
        self.path = path
        self.is_continued = append
        """Whether the file has the rows of an earlier run."""
        self.count = 0
        """Number of rows that this object has appended."""
        self._check = check
        self._problems: list[str] = []
        self._file = path.open("a" if append else "w", newline="")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(kind)])
        if not append:
            self._writer.writeheader()
        self._file.flush()

    def append(self, row: Any) -> None:  # noqa: ANN401
        """Writes a row immediately."""
        values = {
            key: json.dumps(value, separators=(",", ":")) if isinstance(value, list) else value
            for key, value in asdict(row).items()
        }
        self._writer.writerow(values)
        self._file.flush()
        self.count += 1
        if self._check is not None:
            self._problems += self._check(row)

    def take_problems(self) -> list[str]:
        """Returns the problems of the rows appended since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_rows(path: Path, kind: type, topic: str) -> pd.DataFrame:
    """Reads a file of rows of the dataclass `kind`. Missing numbers are NaN; lists and objects stay JSON text."""
    text_columns = {field.name: str for field in fields(kind) if "str" in str(field.type) or "list" in str(field.type)}
    frame = pd.read_csv(path, dtype=text_columns)
    missing = [field.name for field in fields(kind) if field.name not in frame.columns]
    if missing:
        raise ValueError(f"{path}: not a raw file of topic {topic}: no column {', '.join(missing)}")
    return frame


def matching(frame: pd.DataFrame, **where: str | int | float) -> pd.DataFrame:
    """Returns the rows in which each column named in `where` has the given value."""
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def numbers(column: "pd.Series[Any]") -> list[float]:
    """Returns the values of a column that are not missing."""
    return [float(value) for value in column.dropna()]


def pick(frame: pd.DataFrame, column: str, **where: str | int | float) -> list[float]:
    """Returns the values of `column` that are not missing, from the rows that match all of `where`."""
    return numbers(matching(frame, **where)[column])


def milliseconds(values_us: Sequence[float]) -> list[float]:
    """Converts from microseconds."""
    return [value / 1e3 for value in values_us]


def seconds(values_us: Sequence[float]) -> list[float]:
    """Converts from microseconds."""
    return [value / 1e6 for value in values_us]


def median_or_none(values: Sequence[float]) -> float | None:
    """Returns the median for a cell of a table, which stays empty without values."""
    return median(values) if values else None


def read_sidecar(raw: Path, name: str, default: Any) -> Any:  # noqa: ANN401
    """Returns the JSON of a file in the folder of the rows, or `default` if there is none."""
    path = raw.parent / name
    return json.loads(path.read_text()) if path.exists() else default


def write_sidecar(raw: Path, name: str, content: Any) -> None:  # noqa: ANN401
    """Writes a JSON file into the folder of the rows."""
    (raw.parent / name).write_text(json.dumps(content) + "\n")
