"""Sizes of differences, with bootstrap intervals; and a permutation test, which assumes only exchangeability."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rekindle_lab.stats import RESAMPLES, SEED

CHUNK = 60_000
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
        return [name for name, one in named.items() if one is not None and one.low is None]


def _rounds(width: int, total: int) -> Iterator[int]:
    """Yields sizes of chunks that make `total` resamplings of `width` values."""
    size = max(1, min(total, CHUNK // max(1, width)))
    for start in range(0, total, size):
        yield min(size, total - start)


def _resampled(values: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns means and variances (n - 1) of resampled groups."""
    means, variances = [], []
    for count in _rounds(values.size, RESAMPLES):
        drawn = values[generator.integers(0, values.size, (count, values.size))]
        means.append(drawn.mean(axis=1))
        variances.append(drawn.var(axis=1, ddof=1))
    return np.concatenate(means), np.concatenate(variances)


def _interval(value: float, resampled: np.ndarray) -> Interval | None:
    if not np.isfinite(value):
        return None
    if not np.isfinite(resampled).all():
        return Interval(float(value))
    low, high = np.quantile(resampled, (0.025, 0.975))
    return Interval(float(value), float(low), float(high))


def effects(samples: dict[str, np.ndarray]) -> Effects:
    """Computes the effect sizes of the levels' values, at least two values for each level."""
    generator = np.random.default_rng(SEED)
    drawn = {level: _resampled(values, generator) for level, values in samples.items()}
    own = {level: (values.mean(), values.var(ddof=1)) for level, values in samples.items()}
    sizes = np.array([values.size for values in samples.values()], dtype=float)

    def explained(means: np.ndarray, variances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centre = (means * sizes).sum(axis=-1, keepdims=True) / sizes.sum()
        between = (sizes * (means - centre) ** 2).sum(axis=-1)
        within = ((sizes - 1) * variances).sum(axis=-1)
        df, df_error = sizes.size - 1, sizes.sum() - sizes.size
        total = between + within
        with np.errstate(invalid="ignore", divide="ignore"):
            error = within / df_error
            return between / total, (between - df * error) / (total + error)

    own_means, own_variances = (np.array([own[level][i] for level in samples]) for i in range(2))
    all_means, all_variances = (np.stack([drawn[level][i] for level in samples], axis=-1) for i in range(2))
    eta, omega = explained(own_means, own_variances)
    etas, omegas = explained(all_means, all_variances)
    pairs = tuple(_pair(one, other, samples, own, drawn) for one, other in combinations(samples, 2))
    return Effects(_interval(float(eta), etas), _interval(float(omega), omegas), pairs)


def _pair(
    one: str,
    other: str,
    samples: dict[str, np.ndarray],
    own: dict[str, tuple[float, float]],
    drawn: dict[str, tuple[np.ndarray, np.ndarray]],
) -> Pair:
    n, m = samples[one].size, samples[other].size
    (mean, variance), (other_mean, other_variance) = own[one], own[other]
    (means, variances), (other_means, other_variances) = drawn[one], drawn[other]
    small = 1 - 3 / (4 * (n + m - 2) - 1)

    def g(difference: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return small * difference / np.sqrt(((n - 1) * first + (m - 1) * second) / (n + m - 2))

    difference = _interval(mean - other_mean, means - other_means)
    assert difference is not None
    one_side = bool((other_means > 0).all() or (other_means < 0).all()) and other_mean != 0
    return Pair(
        one,
        other,
        difference,
        _interval(mean / other_mean - 1, means / other_means - 1) if one_side else None,
        _interval(
            float(g(np.asarray(mean - other_mean), np.asarray(variance), np.asarray(other_variance))),
            g(means - other_means, variances, other_variances),
        ),
    )


def permutation_p(values: np.ndarray, levels: Sequence[str], blocks: Sequence[int] | None = None) -> float:
    """Returns the probability (to 1) of so large an F if levels were assigned by chance, within blocks if any."""
    labels = np.asarray(levels)
    strata = np.zeros(values.size, dtype=int) if blocks is None else np.asarray(blocks)
    generator = np.random.default_rng(SEED)
    names = list(dict.fromkeys(levels))
    members = np.stack([labels == name for name in names]).astype(float)
    counts = members.sum(axis=1)
    centred = values - values.mean()

    def between(rows: np.ndarray) -> np.ndarray:
        # F grows with this sum alone: the total sum of squares is the same for all arrangements.
        return ((rows @ members.T) ** 2 / counts).sum(axis=1)

    observed = float(between(centred[None, :])[0])
    if not centred.any():
        return 1.0
    slack = 1e-9 * max(observed, float((centred**2).sum()))
    as_large = 0
    for count in _rounds(values.size, RESAMPLES):
        rows = np.tile(centred, (count, 1))
        for stratum in np.unique(strata):
            columns = np.flatnonzero(strata == stratum)
            rows[:, columns] = generator.permuted(rows[:, columns], axis=1)
        as_large += int((between(rows) >= observed - slack).sum())
    return (1 + as_large) / (RESAMPLES + 1)
