"""Checks the assumptions of analysis of variance: equal variances, normal and independent residuals.

A residual is what the model leaves of a value: the value less the mean of its level, or less what level and block
predict. Entry points: `residuals`, then `check_equal_variances`, `check_normality` and `check_independence`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.stattools import durbin_watson

from rekindle_lab.analysis.anova import Group, fitted, variance_ratio
from rekindle_lab.stats import SEED

MAX_SHAPIRO_VALUES = 5000
"""Largest sample for which Shapiro and Wilk's p is accurate, by scipy's documentation."""
ORDER_SHUFFLES = 1999
"""Number of random orders of the runs that the observed order is compared with."""
MIN_RUNS_PER_LEVEL = 3
"""Least number of values per level for the tests of variances."""


@dataclass(frozen=True)
class Check:
    """A test of one assumption. A small `p` is evidence against the assumption."""

    name: str
    statistic: float
    p: float


def residuals(values: np.ndarray, levels: Sequence[str], blocks: Sequence[int] | None = None) -> np.ndarray:
    """Returns each value less its level's mean, or less the prediction of level and block, in the order of `values`."""
    if blocks is not None:
        return values - fitted(values, levels, blocks)
    level_of_value = np.asarray(levels)
    result = np.empty_like(values)
    for level in dict.fromkeys(levels):
        in_level = level_of_value == level
        result[in_level] = values[in_level] - values[in_level].mean()
    return result


def check_equal_variances(samples: Sequence[np.ndarray]) -> list[Check]:
    """Runs the tests that the paper names: O'Brien, Brown-Forsythe, Levene, Bartlett, F of variances for two groups.

    Every sample must vary. The first three tests use deviations from the middle, which carry no information for two
    values: these tests are omitted if a level has only two.
    """
    from_variances = _check_variance_estimates(samples)
    if min(sample.size for sample in samples) < MIN_RUNS_PER_LEVEL:
        return from_variances
    # scipy compares its arithmetic with an absolute bound, which values in bytes exceed. The tests are scale-free.
    scale = max(float(sample.std(ddof=1)) for sample in samples)
    transformed = stats.obrientransform(*((sample - sample.mean()) / scale for sample in samples))
    return [
        Check("O'Brien", *map(float, stats.f_oneway(*transformed))),
        Check("Brown-Forsythe", *map(float, stats.levene(*samples, center="median"))),
        Check("Levene", *map(float, stats.levene(*samples, center="mean"))),
        *from_variances,
    ]


def _check_variance_estimates(samples: Sequence[np.ndarray]) -> list[Check]:
    """Runs the tests that compare estimates of the variances themselves; two values per level are enough."""
    checks = [Check("Bartlett", *map(float, stats.bartlett(*samples)))]
    if len(samples) == 2:
        comparison = variance_ratio(Group.of(samples[0]), Group.of(samples[1]))
        checks.append(Check("F of variances", comparison.ratio, comparison.p))
    return checks


def check_normality(residuals: np.ndarray) -> Check:
    """Tests whether residuals may be normally distributed."""
    if residuals.size <= MAX_SHAPIRO_VALUES:
        return Check("Shapiro-Wilk", *map(float, stats.shapiro(residuals)))
    return Check("D'Agostino-Pearson", *map(float, stats.normaltest(residuals)))


def check_independence(residuals: np.ndarray) -> list[Check]:
    """Tests whether successive runs are correlated: autocorrelation with its p by permutation, Durbin-Watson.

    Durbin-Watson has no p of its own: 2 is no correlation, towards 0 positive, towards 4 negative correlation.
    """
    centred = residuals - residuals.mean()
    sum_of_squares = float((centred**2).sum())
    if sum_of_squares == 0:
        raise ValueError("residuals that do not vary have no order")
    observed = float((centred[1:] * centred[:-1]).sum()) / sum_of_squares  # of each run with the next (lag 1)
    generator = np.random.default_rng(SEED)
    shuffled = generator.permuted(np.tile(centred, (ORDER_SHUFFLES, 1)), axis=1)
    by_chance = (shuffled[:, 1:] * shuffled[:, :-1]).sum(axis=1) / sum_of_squares
    rounding_error = 1e-12
    as_large = int((np.abs(by_chance) >= abs(observed) - rounding_error).sum())
    return [
        Check("autocorrelation, lag 1", observed, (1 + as_large) / (ORDER_SHUFFLES + 1)),
        Check("Durbin-Watson", float(durbin_watson(residuals)), float("nan")),
    ]
