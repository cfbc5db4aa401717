"""Reads samples (JSON lines, docs/aging-samples.md) into series: the values of one metric between two reboots.

    {"format": 1, "host": "a", "guest": null, "boot": "7f3c", "unix_s": 1800000000, "free_memory_kib": 81234, ...}

`boot` identifies the boot of the host or guest; the metrics are optional (`METRICS`), each with a limit if one is known
(`open_files_limit`). Entry point: `read`. A file with problems is rejected, with all problems at the same time.
"""

import difflib
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle_lab.numbers import is_finite_number

FORMAT = 1
MAX_LISTED_PROBLEMS = 20
METRICS = {
    "free_memory_kib": -1,
    "slab_kib": 1,
    "swap_used_kib": 1,
    "open_files": 1,
    "resident_kib": 1,
    "response_time_ms": 1,
    "guest_free_memory_kib": -1,
    "guest_slab_kib": 1,
    "guest_swap_used_kib": 1,
    "guest_open_files": 1,
}
"""The metrics that are judged, with the sign of the harmful direction."""
CONTEXT_KEYS = ("format", "host", "guest", "unix_s", "boot")
"""The keys of a sample that are not metrics."""
KEYS = (*CONTEXT_KEYS, *METRICS, *(f"{metric}_limit" for metric in METRICS))
LIMITS = {"free_memory_kib": 0.0, "guest_free_memory_kib": 0.0}
"""Built-in limits of metrics. Other limits are in the samples (`open_files_limit`) or given by the user."""


class SamplesError(ValueError):
    """Samples that cannot be used. The text names rows and columns."""


@dataclass(frozen=True)
class Series:
    """Values of one metric of one host or guest between two boots. `seconds` counts from 1970 and grows."""

    host: str
    guest: str | None
    metric: str
    boot: str
    seconds: np.ndarray
    values: np.ndarray
    limit: float | None
    before: int = 0
    """Number of samples of earlier boots, which are ignored."""

    @property
    def name(self) -> str:
        """Name of the series in tables."""
        return f"{self.host}{f'/{self.guest}' if self.guest else ''} {self.metric}"

    @property
    def hours(self) -> float:
        """Hours from the first sample to the last."""
        return float(self.seconds[-1] - self.seconds[0]) / 3600


def read(path: Path, limits: dict[str, float] | None = None) -> list[Series]:
    """Returns all series of a file, each since the last boot of its host or guest. Raises `SamplesError`.

    `limits`: limits by metric, which override those in the samples.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SamplesError(f"{path}: {error}") from error
    reader = _Reader()
    for row, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            reader.read_line(row, line)
    if not reader.points and not reader.problems:
        reader.problems.append("the file has no samples")
    series = []
    if not reader.problems:
        series = [reader.series_since_last_boot(key, points, limits or {}) for key, points in reader.points.items()]
    if reader.problems:
        raise SamplesError(_describe_problems(path, reader.problems))
    return series


def _describe_problems(path: Path, problems: list[str]) -> str:
    text = f"{path}: {len(problems)} problem{'s' if len(problems) != 1 else ''}\n"
    text += "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED_PROBLEMS])
    if len(problems) > MAX_LISTED_PROBLEMS:
        text += f"\n  and {len(problems) - MAX_LISTED_PROBLEMS} more"
    return text


class _SeriesKey(NamedTuple):
    """What a series is of."""

    host: str
    guest: str | None
    metric: str


class _Point(NamedTuple):
    """One value of a series."""

    boot: str
    unix_s: float
    value: float
    limit: float | None


class _Reader:
    """Collects the values and the problems in the lines of one file."""

    def __init__(self) -> None:
        self.points: dict[_SeriesKey, list[_Point]] = defaultdict(list)
        self.problems: list[str] = []
        self._reported_keys: set[str] = set()
        """Unknown keys, each of which is reported once."""

    def read_line(self, row: int, line: str) -> None:
        """Checks one line, and adds its values if it has no problem."""
        try:
            sample = json.loads(line)
            if not isinstance(sample, dict):
                raise ValueError("not an object")
        except ValueError as error:
            self._report(row, "-", f"not JSON ({error})")
            return
        problems_before = len(self.problems)
        self._check_keys(row, sample)
        self._check_context(row, sample)
        self._check_metrics(row, sample)
        if len(self.problems) > problems_before:
            return
        for metric in METRICS:
            if metric in sample:
                key = _SeriesKey(sample["host"], sample.get("guest"), metric)
                limit = sample.get(f"{metric}_limit")
                self.points[key].append(_Point(sample["boot"], float(sample["unix_s"]), float(sample[metric]), limit))

    def _report(self, row: int | str, column: str, problem: str) -> None:
        self.problems.append(f"row {row}, column {column}: {problem}")

    def _check_keys(self, row: int, sample: dict[str, Any]) -> None:
        for key in sample:
            if key not in KEYS and key not in self._reported_keys:
                near = difflib.get_close_matches(key, KEYS, 1)
                hint = f"did you mean {near[0]}?" if near else f"metrics are: {', '.join(METRICS)}"
                self._report(row, key, f"unknown; {hint}")
                self._reported_keys.add(key)

    def _check_context(self, row: int, sample: dict[str, Any]) -> None:
        """Checks the keys that are not metrics."""
        problems_before = len(self.problems)
        for key, kind in (("format", int), ("host", str), ("unix_s", int | float), ("boot", str)):
            if key not in sample or not isinstance(sample[key], kind) or isinstance(sample[key], bool):
                self._report(row, key, f"{sample.get(key)!r} is not what it must be")
        if len(self.problems) == problems_before and not is_finite_number(sample["unix_s"]):
            self._report(row, "unix_s", f"{sample['unix_s']!r} is not a finite number")
        if not isinstance(sample.get("guest"), str | None):
            self._report(row, "guest", f"{sample['guest']!r} is not what it must be")
        if len(self.problems) == problems_before and sample["format"] != FORMAT:
            self._report(row, "format", f"{sample['format']}; this program reads {FORMAT}")

    def _check_metrics(self, row: int, sample: dict[str, Any]) -> None:
        for metric in METRICS:
            for column in (metric, f"{metric}_limit"):
                if column in sample and not is_finite_number(sample[column]):
                    self._report(row, column, f"{sample[column]!r} is not a finite number")

    def series_since_last_boot(self, key: _SeriesKey, points: list[_Point], limits: dict[str, float]) -> Series:
        """Returns the values since the last boot, in the order of time."""
        by_time = sorted(points, key=lambda point: point.unix_s)
        last_boot = by_time[-1].boot
        since_boot = [point for point in by_time if point.boot == last_boot]
        for point, following in pairwise(since_boot):
            if point.unix_s == following.unix_s:
                where = f"{key.host} {key.guest or ''}"
                self._report("-", "unix_s", f"{where} has two samples of {key.metric} at {point.unix_s:.0f}")
                break
        recorded = [point.limit for point in since_boot if point.limit is not None]
        return Series(
            **key._asdict(),
            boot=last_boot,
            seconds=np.array([point.unix_s for point in since_boot]),
            values=np.array([point.value for point in since_boot]),
            limit=limits.get(key.metric, recorded[-1] if recorded else LIMITS.get(key.metric)),
            before=len(points) - len(since_boot),
        )


class Points(NamedTuple):
    """The points of a series in the order of time."""

    seconds: np.ndarray
    values: np.ndarray


def thin(series: Series, max_points: int = 200) -> Points:
    """Returns medians over at most `max_points` equal time spans, with the median time of each span."""
    seconds, values = series.seconds, series.values
    if seconds.size <= max_points:
        return Points(seconds, values)
    share_of_time = (seconds - seconds[0]) / (seconds[-1] - seconds[0])
    span_of_value = (share_of_time * max_points).clip(max=max_points - 1).astype(int)
    spans = np.unique(span_of_value)
    return Points(
        np.array([np.median(seconds[span_of_value == span]) for span in spans]),
        np.array([np.median(values[span_of_value == span]) for span in spans]),
    )
