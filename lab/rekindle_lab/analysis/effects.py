"""How large the differences between levels are (`effects`), and whether chance explains them (`permutation_p`).

A level is one of the compared ways; its sample has the values of its runs. The effect sizes:

- eta squared: the share of the variance that the levels explain; omega squared: the same without its upward bias (Hays,
  Statistics for Psychologists, 1963);
- for two levels: the difference of the means, in the response's unit and relative to the second, and Hedges' g: the
  difference in pooled standard deviations, corrected for small samples (Hedges, J. Educational Statistics 6, 1981).

Each has a 95 % interval by the percentile bootstrap: the same figure of `RESAMPLES` resamples, drawn with replacement
from the values of each level; the interval holds the middle 95 % of them. It assumes no normal distribution.

The permutation test assigns the values to the levels at random, many times: p is the share of assignments whose
difference is at least the observed one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rekindle_lab.stats import RESAMPLES, SEED

CHUNK_VALUES = 60_000
"""Number of values in one chunk of resamplings: a chunk fits into a processor's cache, which halves the time."""


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % bootstrap interval. The ends are `None` where some resamples have no such figure."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Pair:
    """The comparison of two levels. `difference` is in the response's unit; `relative`: over the mean of `other`."""

    level: str
    other: str
    difference: Interval
    relative: Interval | None
    """`None` where the mean of `other` is 0, or its resampled means are on both sides of 0."""
    hedges_g: Interval | None
    """The difference in pooled standard deviations, corrected for small samples; `None` where neither varies."""


@dataclass(frozen=True)
class Effects:
    """Effect sizes of one response."""

    eta_squared: Interval | None
    """Share of the variance that the levels explain; `None` where nothing varies."""
    omega_squared: Interval | None
    """`eta_squared`, corrected for bias."""
    pairs: tuple[Pair, ...]

    @property
    def without_interval(self) -> list[str]:
        """Names the figures that have a value but no interval."""
        named = {"eta²": self.eta_squared, "omega²": self.omega_squared}
        named |= {f"Hedges' g of {pair.level} - {pair.other}": pair.hedges_g for pair in self.pairs}
        return [name for name, figure in named.items() if figure is not None and figure.low is None]


class _Moments(NamedTuple):
    """Mean and variance (n - 1) of a sample; of all its resamples, as two arrays."""

    mean: np.ndarray
    variance: np.ndarray


@dataclass(frozen=True)
class _Level:
    """A level's sample: its size, its own moments, and those of its resamples."""

    size: int
    observed: _Moments
    resampled: _Moments


def effects(samples: dict[str, np.ndarray]) -> Effects:
    """Computes the effect sizes of the levels' values, at least two values for each level."""
    generator = np.random.default_rng(SEED)
    levels = {
        name: _Level(values.size, _Moments(values.mean(), values.var(ddof=1)), _resample(values, generator))
        for name, values in samples.items()
    }
    sizes = np.array([level.size for level in levels.values()], dtype=float)
    observed = _explained_variance(sizes, [level.observed for level in levels.values()])
    resampled = _explained_variance(sizes, [level.resampled for level in levels.values()])
    return Effects(
        _interval(float(observed.eta_squared), resampled.eta_squared),
        _interval(float(observed.omega_squared), resampled.omega_squared),
        tuple(_compare(name, levels[name], other, levels[other]) for name, other in combinations(levels, 2)),
    )


def _resample(values: np.ndarray, generator: np.random.Generator) -> _Moments:
    """Draws the resamples of a level; returns their moments."""
    means, variances = [], []
    for count in _chunk_sizes(values.size, RESAMPLES):
        drawn = values[generator.integers(0, values.size, (count, values.size))]
        means.append(drawn.mean(axis=1))
        variances.append(drawn.var(axis=1, ddof=1))
    return _Moments(np.concatenate(means), np.concatenate(variances))


def _chunk_sizes(values_per_resample: int, total: int) -> Iterator[int]:
    """Yields the numbers of resamples of chunks that make `total` resamples."""
    size = max(1, min(total, CHUNK_VALUES // max(1, values_per_resample)))
    for start in range(0, total, size):
        yield min(size, total - start)


class _ExplainedVariance(NamedTuple):
    """The share of the variance that the levels explain, without and with a correction for bias."""

    eta_squared: np.ndarray
    omega_squared: np.ndarray


def _explained_variance(sizes: np.ndarray, levels: Sequence[_Moments]) -> _ExplainedVariance:
    """Computes eta² and omega² from the levels' moments: of the samples or, along the first axis, of all resamples."""
    means = np.stack([level.mean for level in levels], axis=-1)
    variances = np.stack([level.variance for level in levels], axis=-1)
    grand_mean = (means * sizes).sum(axis=-1, keepdims=True) / sizes.sum()
    between = (sizes * (means - grand_mean) ** 2).sum(axis=-1)
    within = ((sizes - 1) * variances).sum(axis=-1)
    df, df_error = sizes.size - 1, sizes.sum() - sizes.size
    total = between + within
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_error = within / df_error
        return _ExplainedVariance(between / total, (between - df * mean_error) / (total + mean_error))


def _interval(value: float, resampled: np.ndarray) -> Interval | None:
    """Returns a figure with the interval of its resamples; `None` for a figure that is not defined."""
    if not np.isfinite(value):
        return None
    if not np.isfinite(resampled).all():
        return Interval(float(value))
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def _compare(name: str, level: _Level, other_name: str, other: _Level) -> Pair:
    """Compares two levels."""
    difference = _interval(level.observed.mean - other.observed.mean, level.resampled.mean - other.resampled.mean)
    assert difference is not None
    other_means = other.resampled.mean
    other_has_one_sign = bool((other_means > 0).all() or (other_means < 0).all()) and other.observed.mean != 0
    relative = None
    if other_has_one_sign:
        relative = _interval(level.observed.mean / other.observed.mean - 1, level.resampled.mean / other_means - 1)
    hedges_g = _interval(
        float(_hedges_g(level.observed, other.observed, sizes=(level.size, other.size))),
        _hedges_g(level.resampled, other.resampled, sizes=(level.size, other.size)),
    )
    return Pair(name, other_name, difference, relative, hedges_g)


def _hedges_g(moments: _Moments, other: _Moments, *, sizes: tuple[int, int]) -> np.ndarray:
    """Returns Hedges' g of two levels with `sizes` values, with his approximation of the correction."""
    size, other_size = sizes
    df = size + other_size - 2
    small_sample_factor = 1 - 3 / (4 * df - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        pooled = np.sqrt(((size - 1) * moments.variance + (other_size - 1) * other.variance) / df)
        return small_sample_factor * np.asarray(moments.mean - other.mean) / pooled


def permutation_p(values: np.ndarray, levels: Sequence[str], blocks: Sequence[int] | None = None) -> float:
    """Returns the probability (to 1) of so large an F if levels were assigned by chance, within blocks if any."""
    block_of_value = np.zeros(values.size, dtype=int) if blocks is None else np.asarray(blocks)
    level_of_value = np.asarray(levels)
    is_in_level = np.stack([level_of_value == level for level in dict.fromkeys(levels)]).astype(float)
    level_sizes = is_in_level.sum(axis=1)
    centred = values - values.mean()
    if not centred.any():
        return 1.0

    def between_levels(arrangements: np.ndarray) -> np.ndarray:
        # F grows with this sum alone: the total sum of squares is the same for all arrangements.
        return ((arrangements @ is_in_level.T) ** 2 / level_sizes).sum(axis=1)

    observed = float(between_levels(centred[None, :])[0])
    rounding_error = 1e-9 * max(observed, float((centred**2).sum()))
    generator = np.random.default_rng(SEED)
    as_large = 0  # arrangements whose F is at least the observed one
    for count in _chunk_sizes(values.size, RESAMPLES):
        arrangements = np.tile(centred, (count, 1))
        for block in np.unique(block_of_value):
            columns = np.flatnonzero(block_of_value == block)
            arrangements[:, columns] = generator.permuted(arrangements[:, columns], axis=1)
        as_large += int((between_levels(arrangements) >= observed - rounding_error).sum())
    # The observed arrangement is one of them, so p is never 0.
    return (1 + as_large) / (RESAMPLES + 1)
