"""The statistics of benchmarks: medians, intervals of ratios, permutation tests and the verdict on two samples.

A ratio is that of two medians: ours divided by the peer's. The samples are times, so smaller is better.
"""

import numpy as np
import pytest

from rekindle_lab import stats


def test_median_and_p95_are_the_known_ones():
    """Of 1 to 21, 11 is in the middle and 20 has 95 % of the distance from 1 to 21."""
    values = list(range(1, 22))
    assert stats.median(values) == 11
    assert stats.p95(values) == 20
    assert stats.median([4.0, 1.0]) == 2.5
    assert stats.p95([7.0]) == 7.0


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf")]])
def test_an_invalid_sample_is_rejected(bad):
    with pytest.raises(ValueError):
        stats.median(bad)


def test_a_ratio_of_constants_is_exact():
    assert stats.ratio_interval([3.0] * 5, [2.0] * 5) == (1.5, 1.5)


def test_a_ratio_to_zero_is_rejected():
    with pytest.raises(ValueError, match="positive"):
        stats.ratio_interval([1.0, 2.0], [0.0, 1.0])


def test_the_interval_covers_the_true_ratio():
    """Our times are twice the peer's, with noise: about 95 % of the intervals contain 2."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(40):
        ours = generator.lognormal(0.0, 0.3, 15) * 2
        peer = generator.lognormal(0.0, 0.3, 15)
        low, high = stats.ratio_interval(ours, peer)
        assert low < high
        covered += low <= 2.0 <= high
    assert covered >= 34  # 95% of 40 are 38


def test_the_same_samples_give_the_same_result_again():
    """The seed of the resampling is fixed, so that published figures can be computed again."""
    ours, peer = [5.1, 4.8, 5.6, 5.0], [6.0, 6.4, 5.8, 7.0]
    assert stats.ratio_interval(ours, peer) == stats.ratio_interval(ours, peer)
    assert stats.permutation_p(ours, peer) == stats.permutation_p(ours, peer)


def test_permutation_p_is_small_only_for_different_samples():
    """Two samples without overlap, two that nearly coincide, and one that is too small to permute."""
    low = [5.0, 5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7]
    high = [value + 2 for value in low]
    assert stats.permutation_p(low, high) < 0.01
    assert stats.permutation_p(low, [value + 0.01 for value in reversed(low)]) > 0.3
    assert stats.permutation_p([1.0], high) == 1.0


def test_a_verdict_follows_from_the_interval_of_the_ratio():
    """Half as long again is worse, two thirds is better; the same values in another order are no difference."""
    low = [5.0, 5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7]
    high = [value * 1.5 for value in low]
    assert stats.compare(low, high).verdict == "better"
    assert stats.compare(high, low).verdict == "worse"
    assert stats.compare(low, list(reversed(low))).verdict == "no clear difference"
    losing = stats.compare(high, low)
    assert losing.ratio == pytest.approx(1.5)
    assert losing.low > 1


def test_median_interval_of_one_value_is_that_value():
    assert stats.median_interval([4.2]) == (4.2, 4.2)
