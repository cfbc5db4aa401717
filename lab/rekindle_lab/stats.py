"""Statistics for timings with few samples, long tails and shared machines: medians and resampling, no normal curves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

SEED = 20100401
"""Seed of the resampling, so that one raw file always gives one result."""
RESAMPLES = 9999
"""Number of resamples: the smallest possible p is then 1 / 10,000."""


def _sample(values: Sequence[float]) -> np.ndarray:
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


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% bootstrap interval of the median, in the unit of the values. One value is its own interval."""
    sample = _sample(values)
    if sample.size < 2 or np.ptp(sample) == 0:
        return float(sample[0]), float(sample[0])
    return _interval((sample,), lambda x, axis: np.median(x, axis=axis))


def ratio_interval(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    """Returns the 95% bootstrap interval of median(ours) / median(peer), without a unit. Samples are independent."""
    our_sample, peer_sample = _sample(ours), _sample(peer)
    if (peer_sample <= 0).any():
        raise ValueError("a ratio needs a peer with positive values only")
    if np.ptp(our_sample) == 0 and np.ptp(peer_sample) == 0:
        ratio = float(our_sample[0] / peer_sample[0])
        return ratio, ratio
    return _interval((our_sample, peer_sample), lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis))


def _interval(samples: tuple[np.ndarray, ...], statistic: object) -> tuple[float, float]:
    result = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def permutation_p(ours: Sequence[float], peer: Sequence[float]) -> float:
    """Returns the two-sided p (to 1) of so large a difference of medians if both samples are of one distribution."""
    our_sample, peer_sample = _sample(ours), _sample(peer)
    if our_sample.size < 2 or peer_sample.size < 2:
        return 1.0
    result = stats.permutation_test(
        (our_sample, peer_sample),
        lambda x, y, axis: np.median(x, axis=axis) - np.median(y, axis=axis),
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
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `no clear difference`: the interval contains 1, or chance gives it once in 20 times."""
        if self.p >= 0.05 or self.low <= 1.0 <= self.high:
            return "no clear difference"
        return "better" if self.ratio < 1.0 else "worse"


def compare(ours: Sequence[float], peer: Sequence[float]) -> Comparison:
    """Compares two samples of durations in one unit."""
    our_median, peer_median = median(ours), median(peer)
    low, high = ratio_interval(ours, peer)
    return Comparison(
        ours=our_median,
        peer=peer_median,
        ours_p95=p95(ours),
        peer_p95=p95(peer),
        n_ours=len(ours),
        n_peer=len(peer),
        ratio=our_median / peer_median,
        low=low,
        high=high,
        p=permutation_p(ours, peer),
    )
