"""Reads samples (JSON lines) into series: the values of one metric between two reboots."""

import difflib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle_lab.numbers import finite

FORMAT = 1
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
ABOUT = ("format", "host", "guest", "unix_s", "boot")
"""The keys of a sample that are not metrics."""
KEYS = (*ABOUT, *METRICS, *(f"{metric}_limit" for metric in METRICS))
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
    """Returns all series of a file, each since the last boot of its host or guest. Raises `SamplesError`."""
    problems: list[str] = []
    strange: set[str] = set()
    found: dict[tuple[str, str | None, str], list[tuple[str, float, float, float | None]]] = defaultdict(list)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SamplesError(f"{path}: {error}") from error
    for row, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            _sample(row, line, found, problems, strange)
    if not found and not problems:
        problems.append("the file has no samples")
    made = [] if problems else [_series(key, rows, limits or {}, problems) for key, rows in found.items()]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise SamplesError(f"{path}: {len(problems)} problem{'s' if len(problems) != 1 else ''}\n{shown}{more}")
    return made


def _sample(row: int, line: str, found: dict[Any, list[Any]], problems: list[str], strange: set[str]) -> None:
    """Checks one line and adds its values to `found`. `strange`: unknown keys that were reported already."""
    try:
        sample = json.loads(line)
        if not isinstance(sample, dict):
            raise ValueError("not an object")
    except ValueError as error:
        problems.append(f"row {row}, column -: not JSON ({error})")
        return
    before = len(problems)
    for key in sample:
        if key not in KEYS and key not in strange:
            near = difflib.get_close_matches(key, KEYS, 1)
            mean = f"did you mean {near[0]}?" if near else f"metrics are: {', '.join(METRICS)}"
            problems.append(f"row {row}, column {key}: unknown; {mean}")
            strange.add(key)
    for key, kind in (("format", int), ("host", str), ("unix_s", int | float), ("boot", str)):
        if key not in sample or not isinstance(sample[key], kind) or isinstance(sample[key], bool):
            problems.append(f"row {row}, column {key}: {sample.get(key)!r} is not what it must be")
    if len(problems) == before and not finite(sample["unix_s"]):
        problems.append(f"row {row}, column unix_s: {sample['unix_s']!r} is not a finite number")
    if not isinstance(sample.get("guest"), str | None):
        problems.append(f"row {row}, column guest: {sample['guest']!r} is not what it must be")
    if len(problems) == before and sample["format"] != FORMAT:
        problems.append(f"row {row}, column format: {sample['format']}; this program reads {FORMAT}")
    for metric in METRICS:
        for column in (metric, f"{metric}_limit"):
            value = sample.get(column)
            good = isinstance(value, int | float) and not isinstance(value, bool) and finite(value)
            if column in sample and not good:
                problems.append(f"row {row}, column {column}: {value!r} is not a finite number")
    if len(problems) > before:
        return
    for metric in METRICS:
        if metric in sample:
            key = (sample["host"], sample.get("guest"), metric)
            limit = sample.get(f"{metric}_limit")
            found[key].append((sample["boot"], float(sample["unix_s"]), float(sample[metric]), limit))


def _series(
    key: tuple[str, str | None, str],
    rows: list[tuple[str, float, float, float | None]],
    limits: dict[str, float],
    problems: list[str],
) -> Series:
    host, guest, metric = key
    rows = sorted(rows, key=lambda row: row[1])
    boot = rows[-1][0]
    mine = [row for row in rows if row[0] == boot]
    seconds = np.array([row[1] for row in mine])
    if (np.diff(seconds) == 0).any():
        at = seconds[int(np.flatnonzero(np.diff(seconds) == 0)[0])]
        problems.append(f"row -, column unix_s: {host} {guest or ''} has two samples of {metric} at {at:.0f}")
    recorded = [row[3] for row in mine if row[3] is not None]
    limit = limits.get(metric, recorded[-1] if recorded else LIMITS.get(metric))
    values = np.array([row[2] for row in mine])
    return Series(host, guest, metric, boot, seconds, values, limit, before=len(rows) - len(mine))


def thin(series: Series, most: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Returns medians over at most `most` equal time spans: the middles of the spans in seconds, and the medians."""
    seconds, values = series.seconds, series.values
    if seconds.size <= most:
        return seconds, values
    place = ((seconds - seconds[0]) / (seconds[-1] - seconds[0]) * most).clip(max=most - 1).astype(int)
    kept = np.unique(place)
    return (
        np.array([np.median(seconds[place == one]) for one in kept]),
        np.array([np.median(values[place == one]) for one in kept]),
    )
