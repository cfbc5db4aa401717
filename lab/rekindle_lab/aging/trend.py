"""Tests whether a series rises or falls, and how fast, without assuming a shape or independence.

Mann and Kendall's test counts pairs of samples that rise against pairs that fall. Samples of a machine are correlated,
so the count varies more than the test assumes. Hamed and Rao (J. Hydrology 204, 1998) correct the variance of the count
by the autocorrelation of the detrended ranks: the inflation. The correction is an estimate, from as many independent
values as are left (n over the inflation), so Student's t replaces the normal curve.

The slope is Sen's (J. Am. Stat. Assoc. 63, 1968): the median of the slopes of all pairs. The ends of its interval are
two of these slopes, by their ranks. Entry point: `fit_trend`; n is the number of points throughout.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

MIN_POINTS = 10
"""Least number of points of a series."""


@dataclass(frozen=True)
class Trend:
    """The trend of a series. `slope` is Sen's: the median of all pairs' slopes, per second in the metric's unit."""

    p: float
    """Two-sided p of the test that the series neither rises nor falls."""
    slope: float
    slope_low: float
    slope_high: float
    level: float
    """Value of the trend's line at the end of the series."""
    inflation: float
    """Factor by which the count varies more than with independent samples."""
    n: int


def variance_inflation(values: np.ndarray, seconds: np.ndarray, slope: float) -> float:
    """Returns by how much autocorrelation inflates the variance of Mann and Kendall's count; at least 1.

    Autocorrelations of the detrended ranks are summed up to the first that is not positive, since later ones are
    mostly noise. Each is corrected for the bias of a short, detrended series, (2 + 4 r) / n. Their weights in the sum
    are those of Hamed and Rao.
    """
    n = values.size
    ranks = stats.rankdata(values - slope * (seconds - seconds[0]))
    centred = ranks - ranks.mean()
    sum_of_squares = float((centred**2).sum())
    if sum_of_squares == 0:
        return 1.0
    # The direct computation takes O(n²), which is fast enough for a thousand points, and is exact.
    autocorrelation = np.correlate(centred, centred, "full")[n - 1 :] / sum_of_squares
    inflation = 1.0
    for lag in range(1, n - 3):
        observed = float(autocorrelation[lag])
        if observed <= 0:
            break
        unbiased = min(0.995, observed + (2 + 4 * observed) / n)
        inflation += 2 / (n * (n - 1) * (n - 2)) * (n - lag) * (n - lag - 1) * (n - lag - 2) * unbiased
    return max(1.0, inflation)


def fit_trend(seconds: np.ndarray, values: np.ndarray, confidence: float = 0.95) -> Trend:
    """Fits the trend of a series of at least `MIN_POINTS` points. `confidence` is that of the slope's interval."""
    n = values.size
    if n < MIN_POINTS:
        raise ValueError(f"a trend needs at least {MIN_POINTS} points, not {n}")
    earlier, later = np.triu_indices(n, 1)
    rises = values[later] - values[earlier]
    slopes = np.sort(rises / (seconds[later] - seconds[earlier]))
    slope = float(np.median(slopes))
    inflation = variance_inflation(values, seconds, slope)
    count_sd = math.sqrt(_variance_of_independent_count(values) * inflation)
    df = max(1.0, n / inflation - 2)
    rising_less_falling = float(np.sign(rises).sum())
    # Mann and Kendall's correction for continuity moves the count by 1 towards 0.
    z = (rising_less_falling - np.sign(rising_less_falling)) / count_sd if count_sd else 0.0
    half_width = stats.t.ppf((1 + confidence) / 2, df) * count_sd
    # Sen's ranks, equally far from both ends.
    high_rank = min(slopes.size - 1, math.ceil((slopes.size + half_width) / 2))
    low_rank = max(0, slopes.size - 1 - high_rank)
    return Trend(
        p=float(2 * stats.t.sf(abs(z), df)),
        slope=slope,
        slope_low=float(slopes[low_rank]),
        slope_high=float(slopes[high_rank]),
        level=float(np.median(values - slope * (seconds - seconds[-1]))),
        inflation=inflation,
        n=n,
    )


def _variance_of_independent_count(values: np.ndarray) -> float:
    """Returns the variance of Mann and Kendall's count for independent samples, corrected for ties."""
    n = values.size
    _, ties = np.unique(values, return_counts=True)
    return (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
