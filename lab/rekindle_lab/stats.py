"""Statistics for timings with few samples, long tails and shared machines: medians and resampling, no normal curves.

`compare` is the entry point: our values against a peer's. An interval is a 95 % percentile bootstrap interval: the same
figure of many resamples, which are drawn with replacement; the interval holds the middle 95 % of them. A permutation
test mixes both samples and splits them at random, many times: p is the share of splits that differ as much as ours and
the peer's do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

SEED = 20100401
"""Seed of the resampling, so that one raw file always gives one result."""
ALPHA = 0.05
"""Accepted probability of a false difference."""
RESAMPLES = 9999
"""Number of resamples: the smallest possible p is then 1 / 10,000."""


def _sample(values: Sequence[float]) -> np.ndarray:
    """Returns the values as an array. Raises `ValueError` unless they are finite numbers, at least one."""
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or array.size == 0:
        raise ValueError("a sample needs at least one value")
    if not np.isfinite(array).all():
        raise ValueError("a sample holds a value that is not a finite number")
    return array


def median(values: Sequence[float]) -> float:
    """Returns the median, in the unit of the values."""
    return float(np.median(_sample(values)))


def p95(values: Sequence[float]) -> float:
    """Returns the 95th percentile (between two values by linear interpolation), in the unit of the values."""
    return float(np.quantile(_sample(values), 0.95))


def p99(values: Sequence[float]) -> float:
    """Returns the 99th percentile, computed like `p95`."""
    return float(np.quantile(_sample(values), 0.99))


class Interval(NamedTuple):
    """The ends of a 95 % interval."""

    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the 95% bootstrap interval of the median, in the unit of the values. One value is its own interval."""
    sample = _sample(values)
    if sample.size < 2 or np.ptp(sample) == 0:
        return Interval(float(sample[0]), float(sample[0]))
    return _interval((sample,), np.median)


def ratio_interval(ours: Sequence[float], peer: Sequence[float]) -> Interval:
    """Returns the 95% bootstrap interval of median(ours) / median(peer), without a unit. Samples are independent."""
    our_sample, peer_sample = _sample(ours), _sample(peer)
    if (peer_sample <= 0).any():
        raise ValueError("a ratio needs a peer with positive values only")
    if np.ptp(our_sample) == 0 and np.ptp(peer_sample) == 0:
        ratio = float(our_sample[0] / peer_sample[0])
        return Interval(ratio, ratio)

    def ratio_of_medians(ours: np.ndarray, peer: np.ndarray, axis: int) -> np.ndarray:
        return np.median(ours, axis=axis) / np.median(peer, axis=axis)

    return _interval((our_sample, peer_sample), ratio_of_medians)


def _interval(samples: tuple[np.ndarray, ...], statistic: Callable[..., np.ndarray]) -> Interval:
    """Returns the ends of the 95 % interval of `statistic`, a function of the samples along an axis."""
    result = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    return Interval(float(result.confidence_interval.low), float(result.confidence_interval.high))


def permutation_p(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Returns the two-sided p (to 1) of so large a difference of medians if both samples are of one distribution."""
    our_sample, peer_sample = _sample(ours), _sample(peer)
    if our_sample.size < 2 or peer_sample.size < 2:
        return 1.0

    def difference_of_medians(ours: np.ndarray, peer: np.ndarray, axis: int) -> np.ndarray:
        return np.median(ours, axis=axis) - np.median(peer, axis=axis)

    result = stats.permutation_test(
        (our_sample, peer_sample),
        difference_of_medians,
        permutation_type="independent",
        vectorized=True,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(SEED),
    )
    return float(result.pvalue)


@dataclass(frozen=True)
class Comparison:
    """Our values against a peer's; lower is better. Medians and p95 are in the samples' unit, ratios have none."""

    ours: float
    peer: float
    ours_p95: float
    peer_p95: float
    n_ours: int
    n_peer: int
    ratio: float
    """Our median over the peer's."""
    low: float
    """`low` and `high` are the ends of the ratio's interval."""
    high: float
    p: float
    """p of the permutation test."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `no clear difference`: the interval contains 1, or chance gives it once in 20 times."""
        if self.p >= ALPHA or self.low <= 1.0 <= self.high:
            return "no clear difference"
        return "better" if self.ratio < 1.0 else "worse"


def compare(ours: Sequence[float], peer: Sequence[float]) -> Comparison:
    """Compares two samples of durations in one unit."""
    our_median, peer_median = median(ours), median(peer)
    interval = ratio_interval(ours, peer)
    return Comparison(
        ours=our_median,
        peer=peer_median,
        ours_p95=p95(ours),
        peer_p95=p95(peer),
        n_ours=len(ours),
        n_peer=len(peer),
        ratio=our_median / peer_median,
        low=interval.low,
        high=interval.high,
        p=permutation_p(ours, peer),
    )
