"""Tests whether a series rises or falls, and how fast, without assuming a shape or independence.

Mann and Kendall's test counts pairs that rise against pairs that fall. Samples of a machine are correlated, so the
count varies more than the test assumes. Hamed and Rao (1998) correct the variance of the count by the autocorrelation
of the detrended ranks. The correction is an estimate, from as many independent values as are left (`n` over the
inflation), so Student's t replaces the normal curve.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEAST = 10
"""Least number of points of a series."""


@dataclass(frozen=True)
class Trend:
    """The trend of a series. `slope` is Sen's: the median of all pairs' slopes, per second in the metric's unit."""

    p: float
    slope: float
    slope_low: float
    slope_high: float
    level: float
    """Value of the trend's line at the end of the series."""
    inflation: float
    """Factor by which the count varies more than with independent samples."""
    n: int


def effective(values: np.ndarray, seconds: np.ndarray, slope: float) -> float:
    """Returns by how much autocorrelation inflates the variance of Mann and Kendall's count; at least 1.

    Autocorrelations of the detrended ranks are summed up to the first that is not positive, since later ones are
    mostly noise. Each is corrected for the bias of a short, detrended series, (2 + 4 r) / n.
    """
    n = values.size
    ranks = stats.rankdata(values - slope * (seconds - seconds[0]))
    centred = ranks - ranks.mean()
    power = float((centred**2).sum())
    if power == 0:
        return 1.0
    # The direct computation takes O(n²), which is fast enough for a thousand points, and is exact.
    correlation = np.correlate(centred, centred, "full")[n - 1 :] / power
    inflation = 1.0
    for lag in range(1, n - 3):
        seen = float(correlation[lag])
        if seen <= 0:
            break
        real = min(0.995, seen + (2 + 4 * seen) / n)
        inflation += 2 / (n * (n - 1) * (n - 2)) * (n - lag) * (n - lag - 1) * (n - lag - 2) * real
    return max(1.0, inflation)


def trend(seconds: np.ndarray, values: np.ndarray, confidence: float = 0.95) -> Trend:
    """Fits the trend of a series of at least `LEAST` points. `confidence` is that of the slope's interval."""
    n = values.size
    if n < LEAST:
        raise ValueError(f"a trend needs at least {LEAST} points, not {n}")
    first, second = np.triu_indices(n, 1)
    rises = values[second] - values[first]
    slopes = np.sort(rises / (seconds[second] - seconds[first]))
    slope = float(np.median(slopes))
    _, ties = np.unique(values, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    inflation = effective(values, seconds, slope)
    spread = math.sqrt(variance * inflation)
    count = float(np.sign(rises).sum())
    z = 0.0 if spread == 0 else (count - math.copysign(1, count)) / spread if count else 0.0
    df = max(1.0, n / inflation - 2)
    half = stats.t.ppf((1 + confidence) / 2, df) * spread
    pairs = slopes.size
    # Sen's ranks, equally far from both ends.
    high = min(pairs - 1, math.ceil((pairs + half) / 2))
    low = max(0, pairs - 1 - high)
    middle = float(np.median(values - slope * (seconds - seconds[-1])))
    return Trend(
        p=float(2 * stats.t.sf(abs(z), df)),
        slope=slope,
        slope_low=float(slopes[low]),
        slope_high=float(slopes[high]),
        level=middle,
        inflation=inflation,
        n=n,
    )
