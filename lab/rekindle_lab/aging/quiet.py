"""Rate of false alarms on simulated hosts without aging, each judged once a day as a real host would be."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rekindle_lab.aging.exhaustion import judge
from rekindle_lab.aging.samples import Series

DAY_S = 86_400
STEP_S = 900
"""Seconds between two samples. More samples would be thinned out before the judgement."""


def _times(days: int) -> np.ndarray:
    return np.arange(0, days * DAY_S, STEP_S, dtype=float)


def white(generator: np.random.Generator, n: int) -> np.ndarray:
    """Generates independent samples."""
    return generator.normal(size=n)


def persistent(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Generates samples that each keep `share` of the previous sample and add noise."""

    def made(generator: np.random.Generator, n: int) -> np.ndarray:
        new = generator.normal(size=n) * np.sqrt(1 - share**2)
        out = np.empty(n)
        out[0] = generator.normal()
        for index in range(1, n):
            out[index] = share * out[index - 1] + new[index]
        return out

    return made


def daily(generator: np.random.Generator, n: int) -> np.ndarray:
    """Generates a load with a daily period and a random phase."""
    phase = generator.uniform(0, 2 * np.pi)
    return 2 * np.sin(2 * np.pi * np.arange(n) * STEP_S / DAY_S + phase) + persistent(0.5)(generator, n)


def sawtooth(generator: np.random.Generator, n: int) -> np.ndarray:
    """Generates a level that rises and is reset every 5 to 8 hours: garbage collection, caches."""
    out = np.empty(n)
    at = int(-generator.integers(0, 30))
    while at < n:
        length = int(generator.integers(20, 33))
        begin, end = max(0, at), min(n, at + length)
        if begin < end:
            out[begin:end] = np.arange(begin - at, end - at) / length * 3
        at += length
    return out + 0.3 * generator.normal(size=n)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "white": white,
    "persistent-0.5": persistent(0.5),
    "persistent-0.9": persistent(0.9),
    "daily": daily,
    "sawtooth": sawtooth,
}


@dataclass(frozen=True)
class FalseAlarms:
    """False alarms on hosts of one kind. `high` is the upper end of the 95 % interval (Poisson)."""

    kind: str
    host_weeks: int
    alarms: int
    per_host_week: float
    high: float


def false_alarms(kind: str, host_weeks: int, *, seed: int = 1, near: bool = True) -> FalseAlarms:
    """Judges hosts with four metrics each, on each day of the second of two weeks, from all samples until then.

    An alarm that lasts for days counts once. With `near`, limits are so near (6 standard deviations) that the time to
    exhaustion suppresses no alarm, so that only the trend test decides.
    """
    generators = np.random.default_rng(seed).spawn(host_weeks)
    times = _times(14)
    alarms = 0
    for generator in generators:
        metrics = ("free_memory_kib", "slab_kib", "open_files", "response_time_ms")
        values = {metric: KINDS[kind](generator, times.size) for metric in metrics}
        standing: set[str] = set()
        for day in range(8, 15):
            n = day * DAY_S // STEP_S
            series = [
                Series(
                    "quiet",
                    None,
                    metric,
                    "1",
                    times[:n],
                    1000 + 10 * values[metric][:n],
                    (1000 + (-1 if metric == "free_memory_kib" else 1) * (60 if near else 100_000)),
                )
                for metric in metrics
            ]
            now = {found.series.metric for found in judge(series) if found.alarm}
            alarms += len(now - standing)
            standing = now
    high = float(stats.chi2.ppf(0.975, 2 * (alarms + 1)) / 2)
    return FalseAlarms(kind, host_weeks, alarms, alarms / host_weeks, high / host_weeks)
