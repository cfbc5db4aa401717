"""Tests the assumptions of analysis of variance: equal variances, normal and independent residuals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.stattools import durbin_watson

from rekindle_lab.analysis.anova import Group, fitted, variance_ratio
from rekindle_lab.stats import SEED

SHAPIRO_MOST = 5000
"""Largest sample for which Shapiro and Wilk's p is accurate."""
ORDER_RESAMPLES = 1999
LEAST = 3
"""Least number of values per level for the tests of variances."""


@dataclass(frozen=True)
class Check:
    """A test of one assumption. A small `p` is evidence against the assumption."""

    name: str
    statistic: float
    p: float


def equal_variances(samples: Sequence[np.ndarray]) -> list[Check]:
    """Runs the tests that the paper names: O'Brien, Brown-Forsythe, Levene, Bartlett, F of variances for two groups.

    Every sample must vary. The first three tests use deviations from the middle, which carry no information for two
    values: these tests are omitted if a level has only two.
    """
    checks = []
    if min(sample.size for sample in samples) < LEAST:
        return _by_variances(samples)
    # scipy compares its arithmetic with an absolute bound, which values in bytes exceed. The tests are scale-free.
    spread = max(float(sample.std(ddof=1)) for sample in samples)
    transformed = stats.obrientransform(*((sample - sample.mean()) / spread for sample in samples))
    checks.append(Check("O'Brien", *map(float, stats.f_oneway(*transformed))))
    checks.append(Check("Brown-Forsythe", *map(float, stats.levene(*samples, center="median"))))
    checks.append(Check("Levene", *map(float, stats.levene(*samples, center="mean"))))
    return checks + _by_variances(samples)


def _by_variances(samples: Sequence[np.ndarray]) -> list[Check]:
    checks = [Check("Bartlett", *map(float, stats.bartlett(*samples)))]
    if len(samples) == 2:
        checks.append(Check("F of variances", *variance_ratio(Group.of(samples[0]), Group.of(samples[1]))))
    return checks


def residuals(values: np.ndarray, levels: Sequence[str], blocks: Sequence[int] | None = None) -> np.ndarray:
    """Returns each value less its level's mean, or less the prediction of level and block, in the order of `values`."""
    if blocks is not None:
        return values - fitted(values, levels, blocks)
    labels = np.asarray(levels)
    out = np.empty_like(values)
    for level in dict.fromkeys(levels):
        mask = labels == level
        out[mask] = values[mask] - values[mask].mean()
    return out


def normal(residual: np.ndarray) -> Check:
    """Tests whether residuals may be normally distributed."""
    if residual.size <= SHAPIRO_MOST:
        return Check("Shapiro-Wilk", *map(float, stats.shapiro(residual)))
    return Check("D'Agostino-Pearson", *map(float, stats.normaltest(residual)))


def independent(residual: np.ndarray) -> list[Check]:
    """Tests whether successive runs are correlated: autocorrelation with its p by permutation, Durbin-Watson.

    Durbin-Watson has no p of its own: 2 is no correlation, towards 0 positive, towards 4 negative correlation.
    """
    centred = residual - residual.mean()
    power = float((centred**2).sum())
    if power == 0:
        raise ValueError("residuals that do not vary have no order")
    observed = float((centred[1:] * centred[:-1]).sum()) / power
    generator = np.random.default_rng(SEED)
    shuffled = generator.permuted(np.tile(centred, (ORDER_RESAMPLES, 1)), axis=1)
    others = (shuffled[:, 1:] * shuffled[:, :-1]).sum(axis=1) / power
    p = (1 + int((np.abs(others) >= abs(observed) - 1e-12).sum())) / (ORDER_RESAMPLES + 1)
    return [
        Check("autocorrelation, lag 1", observed, p),
        Check("Durbin-Watson", float(durbin_watson(residual)), float("nan")),
    ]
