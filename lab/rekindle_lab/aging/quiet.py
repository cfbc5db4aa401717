"""How often it cries wolf: quiet made-up hosts, judged once a day as a real one would be, alarms counted."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rekindle_lab.aging.exhaustion import judge
from rekindle_lab.aging.samples import Series

DAY_S = 86_400
STEP_S = 900
"""A sample every quarter of an hour: what more there would be is thinned out before it is judged."""


def _times(days: int) -> np.ndarray:
    return np.arange(0, days * DAY_S, STEP_S, dtype=float)


def white(generator: np.random.Generator, n: int) -> np.ndarray:
    """Each sample by itself."""
    return generator.normal(size=n)


def persistent(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Each sample is `share` of the one before it, and something new."""

    def made(generator: np.random.Generator, n: int) -> np.ndarray:
        new = generator.normal(size=n) * np.sqrt(1 - share**2)
        out = np.empty(n)
        out[0] = generator.normal()
        for index in range(1, n):
            out[index] = share * out[index - 1] + new[index]
        return out

    return made


def daily(generator: np.random.Generator, n: int) -> np.ndarray:
    """Load comes and goes by the day, from any hour on."""
    phase = generator.uniform(0, 2 * np.pi)
    return 2 * np.sin(2 * np.pi * np.arange(n) * STEP_S / DAY_S + phase) + persistent(0.5)(generator, n)


def sawtooth(generator: np.random.Generator, n: int) -> np.ndarray:
    """Fills up and is emptied again, every 5 to 8 hours: garbage collection, caches."""
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
class Quiet:
    """What quiet hosts of one kind gave. `high` is the upper end of the 95 % interval (Poisson)."""

    kind: str
    host_weeks: int
    alarms: int
    per_host_week: float
    high: float


def false_alarms(kind: str, host_weeks: int, *, seed: int = 1, near: bool = True) -> Quiet:
    """Judge quiet hosts with four metrics each, every day of the second of two weeks on all that is there until then.

    An alarm that stays for days counts once. With `near`, limits are so near (6 standard deviations) that time to
    exhaustion holds no alarm back: what is left is the trend test's own.
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
    return Quiet(kind, host_weeks, alarms, alarms / host_weeks, high / host_weeks)
