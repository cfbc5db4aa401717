"""Measures false alarms on simulated hosts without aging, each judged once a day as a real host would be.

Such a host has no trend, so each alarm is false. The kinds of hosts (`KINDS`) differ in the noise of their samples:
independent, correlated with the previous sample, with a daily variation, or rising and reset. `false_alarms` counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rekindle_lab.aging.exhaustion import DAY_S, judge
from rekindle_lab.aging.samples import METRICS, Series

STEP_S = 900
"""Seconds between two samples. More samples would be thinned out before the judgement."""
HOST_METRICS = ("free_memory_kib", "slab_kib", "open_files", "response_time_ms")
"""Metrics of a simulated host: all are judged together, as those of a real host."""


def _times(days: int) -> np.ndarray:
    return np.arange(0, days * DAY_S, STEP_S, dtype=float)


def white(generator: np.random.Generator, n: int) -> np.ndarray:
    """Generates independent samples."""
    return generator.normal(size=n)


def persistent(share: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Generates samples that each keep `share` of the previous one and add noise: a first-order autoregression.

    The noise is scaled so that the samples have a standard deviation of 1.
    """

    def generate(generator: np.random.Generator, n: int) -> np.ndarray:
        noise = generator.normal(size=n) * np.sqrt(1 - share**2)
        samples = np.empty(n)
        samples[0] = generator.normal()
        for index in range(1, n):
            samples[index] = share * samples[index - 1] + noise[index]
        return samples

    return generate


def daily(generator: np.random.Generator, n: int) -> np.ndarray:
    """Generates a load with a daily period and a random phase."""
    phase = generator.uniform(0, 2 * np.pi)
    return 2 * np.sin(2 * np.pi * np.arange(n) * STEP_S / DAY_S + phase) + persistent(0.5)(generator, n)


def sawtooth(generator: np.random.Generator, n: int) -> np.ndarray:
    """Generates a level that rises and is reset every 5 to 8 hours: garbage collection, caches."""
    samples = np.empty(n)
    tooth_begin = int(-generator.integers(0, 30))  # the first tooth is partly over
    while tooth_begin < n:
        length = int(generator.integers(20, 33))  # in steps of a quarter of an hour
        begin, end = max(0, tooth_begin), min(n, tooth_begin + length)
        if begin < end:
            samples[begin:end] = np.arange(begin - tooth_begin, end - tooth_begin) / length * 3
        tooth_begin += length
    return samples + 0.3 * generator.normal(size=n)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "white": white,
    "persistent-0.5": persistent(0.5),
    "persistent-0.9": persistent(0.9),
    "daily": daily,
    "sawtooth": sawtooth,
}


@dataclass(frozen=True)
class FalseAlarms:
    """False alarms on hosts of one kind. `high` is the upper end of the 95 % interval of `per_host_week`."""

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
    times = _times(14)
    alarms = 0
    for generator in np.random.default_rng(seed).spawn(host_weeks):
        values = {metric: KINDS[kind](generator, times.size) for metric in HOST_METRICS}
        alarming_the_day_before: set[str] = set()
        for day in range(8, 15):
            until = day * DAY_S // STEP_S
            host = [_series(metric, times[:until], values[metric][:until], near=near) for metric in HOST_METRICS]
            alarming = {finding.series.metric for finding in judge(host) if finding.alarm}
            alarms += len(alarming - alarming_the_day_before)
            alarming_the_day_before = alarming
    # The exact upper limit of a Poisson count (Garwood, Biometrika 28, 1936).
    high = float(stats.chi2.ppf(0.975, 2 * (alarms + 1)) / 2)
    return FalseAlarms(kind, host_weeks, alarms, alarms / host_weeks, high / host_weeks)


def _series(metric: str, seconds: np.ndarray, unit_values: np.ndarray, *, near: bool) -> Series:
    """Returns a series with a level of 1000 and a standard deviation of 10, and its limit in the harmful direction."""
    distance = 60 if near else 100_000  # 60: six standard deviations
    limit = 1000 + METRICS[metric] * distance
    values = 1000 + 10 * unit_values
    return Series(host="quiet", guest=None, metric=metric, boot="1", seconds=seconds, values=values, limit=limit)
