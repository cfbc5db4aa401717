"""Tests, effect sizes and power agree with scipy, statsmodels and textbooks.

Levels are the ways that an experiment compares. Blocks are parts of an experiment, each with all levels.
"""

import numpy as np
import pytest
from invented_runs import three_groups
from scipy import stats
from statsmodels.stats.oneway import anova_oneway
from statsmodels.stats.power import FTestAnovaPower

from rekindle_lab.analysis import anova, assumptions, effects, power, tables
from rekindle_lab.analysis.anova import Group
from rekindle_lab.analysis.correct import bonferroni, holm
from rekindle_lab.analysis.judge import judge_response


def test_anova_and_welch_are_those_of_scipy_and_statsmodels():
    """Three samples, of which only the summaries are used; with two levels, Welch's test is Welch's t test."""
    samples = three_groups()
    groups = [Group.of(sample) for sample in samples]
    ours = anova.one_way(groups)
    f, p = stats.f_oneway(*samples)
    assert (ours.factor.f, ours.factor.p) == (pytest.approx(f), pytest.approx(p))
    assert ours.line("total").ss == pytest.approx(ours.factor.ss + ours.error.ss)
    statsmodels_welch = anova_oneway(samples, use_var="unequal", welch_correction=True)
    our_welch = anova.welch(groups)
    assert our_welch.f == pytest.approx(statsmodels_welch.statistic)
    assert our_welch.df_error == pytest.approx(statsmodels_welch.df[1])
    assert our_welch.p == pytest.approx(statsmodels_welch.pvalue)
    two_levels = anova.welch(groups[:2])
    t = stats.ttest_ind(samples[0], samples[1], equal_var=False)
    assert (two_levels.t, two_levels.p, two_levels.df_error) == (
        pytest.approx(abs(t.statistic)),
        pytest.approx(t.pvalue),
        pytest.approx(t.df),
    )


def test_blocks_reduce_the_error():
    """Blocks differ by 10, levels by 1, with noise of 0.5: only an analysis with blocks finds the levels' difference.

    The design is balanced, so the sums of squares add up, as do the 39 degrees of freedom of 40 values.
    """
    generator = np.random.default_rng(5)
    levels = ["a", "b"] * 20
    blocks = [index // 10 for index in range(40)]
    values = [
        10 * block + (level == "b") + generator.normal(0, 0.5) for level, block in zip(levels, blocks, strict=True)
    ]
    table = anova.blocked(values, levels, blocks)
    assert table.factor.p < 0.001
    assert anova.one_way([Group.of(values[0::2]), Group.of(values[1::2])]).factor.p > 0.5
    assert sum(source.ss for source in table.lines[:-1]) == pytest.approx(table.line("total").ss)  # balanced
    assert sum(source.df for source in table.lines[:-1]) == table.line("total").df == 39


def test_blocks_do_not_count_as_drift():
    """Blocks that differ by 50 look like a drift, and widen the means' intervals, unless they are modelled."""
    generator = np.random.default_rng(6)
    levels = ["a", "b"] * 20
    blocks = [index // 10 for index in range(40)]
    values = [50 * block + generator.normal(0, 0.5) for block in blocks]
    with_blocks, without = judge_response("x_s", values, levels, blocks), judge_response("x_s", values, levels)
    assert with_blocks.independent[0].p > 0.05 > without.independent[0].p

    def width_of_first_interval(result):
        row = tables.means(result)[0]
        return row["95%CI+"] - row["95%CI-"]

    assert width_of_first_interval(with_blocks) < 1 < width_of_first_interval(without)


@pytest.mark.parametrize(
    ("levels", "blocks", "message"),
    [
        ("aabb", (1, 1, 2, 2), "levels and blocks are confounded"),
        ("aabb", (1, 2, 2, 3), "too few for 2 levels in 3 blocks"),
    ],
)
def test_blocks_confounded_with_levels_are_left_out_with_a_note(levels, blocks, message):
    """Levels and blocks cannot be separated, or leave no degree of freedom for the error."""
    result = judge_response("x_s", [1.0, 1.1, 9.0, 9.4], list(levels), blocks)
    assert message in result.notes[0] and result.notes[0].endswith("blocks are left out")
    assert [line.source for line in result.anova.lines] == ["factor", "error", "total"]


@pytest.mark.parametrize("scale", [1.0, 1e7, 1e-7])
def test_variance_tests_do_not_depend_on_the_unit(scale):
    """Seconds or microseconds: the same p. scipy's O'Brien test fails for large numbers without scaling."""
    generator = np.random.default_rng(7)
    samples = [generator.normal(3, 1, 16), generator.normal(3, 5, 16)]
    scaled_p = [check.p for check in assumptions.check_equal_variances([sample * scale for sample in samples])]
    assert scaled_p == pytest.approx([check.p for check in assumptions.check_equal_variances(samples)])


def test_different_variances_are_detected_by_all_five_tests():
    generator = np.random.default_rng(1)
    checks = assumptions.check_equal_variances([generator.normal(0, 1, 30), generator.normal(0, 5, 30)])
    assert [check.name for check in checks] == ["O'Brien", "Brown-Forsythe", "Levene", "Bartlett", "F of variances"]
    assert all(check.p < 0.001 for check in checks)


def test_runs_that_drift_are_correlated():
    drift = np.arange(40.0)
    assert assumptions.check_independence(drift - drift.mean())[0].p < 0.001
    independent = np.random.default_rng(2).normal(0, 1, 40)
    autocorrelation, durbin_watson = assumptions.check_independence(independent)
    assert autocorrelation.p > 0.05
    assert 1.3 < durbin_watson.statistic < 2.7  # 2 is no correlation


def test_permutation_p_is_exact_where_it_can_be_counted():
    """So few assignments are possible that they can be counted; random ones give their share."""
    # 2 of the 20 ways to choose 3 of 6 values are as extreme.
    exact_p = effects.permutation_p(np.array([1.0, 2, 3, 11, 12, 13]), list("aaabbb"))
    assert exact_p == pytest.approx(0.1, abs=0.01)
    # Within blocks of one pair each, 2 of the 8 ways to swap.
    values = np.array([1.0, 11, 2, 12, 3, 13])
    assert effects.permutation_p(values, list("ababab"), [1, 1, 2, 2, 3, 3]) == pytest.approx(0.25, abs=0.02)


def test_effect_sizes_are_the_textbooks():
    """Two levels of 5 values, means 5 and 3, variance 2.5 each.

    The sum of squares between them is 2 · 5 · 1² = 10, within them 2 · 4 · 2.5 = 20, the total 30; the mean error is
    2.5. Hedges' factor for 8 degrees of freedom is 1 - 3 / (4 · 8 - 1).
    """
    samples = {"a": np.array([3.0, 4, 5, 6, 7]), "b": np.array([1.0, 2, 3, 4, 5])}
    sizes = effects.effects(samples)
    assert sizes.eta_squared.value == pytest.approx(10 / 30)
    assert sizes.omega_squared.value == pytest.approx((10 - 2.5) / (30 + 2.5))
    (pair,) = sizes.pairs
    assert pair.difference.value == 2
    assert pair.relative.value == pytest.approx(2 / 3)
    assert pair.hedges_g.value == pytest.approx(2 / np.sqrt(2.5) * (1 - 3 / 31))
    for interval in (sizes.eta_squared, pair.difference, pair.relative, pair.hedges_g):
        assert interval.low < interval.value < interval.high


def test_a_resample_without_variance_takes_the_interval_and_not_the_value():
    """A level with one deviating value of 16 has resamples without it, for which Hedges' g is not defined."""
    samples = {"a": np.array([5.0] * 15 + [6]), "b": np.array([7.0] * 15 + [9])}
    (pair,) = effects.effects(samples).pairs
    pooled = np.sqrt((samples["a"].var(ddof=1) + samples["b"].var(ddof=1)) / 2)
    assert pair.hedges_g.value == pytest.approx((samples["a"].mean() - samples["b"].mean()) / pooled * (1 - 3 / 119))
    assert (pair.hedges_g.low, pair.hedges_g.high) == (None, None)
    result = judge_response("x_s", [*samples["a"], *samples["b"]], ["a"] * 16 + ["b"] * 16)
    assert "Hedges' g of a - b: no interval, since some resamples do not vary" in result.notes
    assert tables.for_people(tables.pairs(result))[0]["Hedges' g"] == f"{pair.hedges_g.value:.4g}"


def test_bootstrap_intervals_cover_the_true_difference():
    """Skew samples whose means differ by 1: about 95 % of the intervals contain it."""
    generator = np.random.default_rng(11)
    covered = 0
    for _ in range(60):
        samples = {"a": generator.exponential(2, 16) + 1, "b": generator.exponential(2, 16)}
        interval = effects.effects(samples).pairs[0].difference
        covered += interval.low <= 1 <= interval.high
    assert covered >= 51  # 95 % of 60 are 57; the percentile bootstrap of 16 skew values is a little too narrow


def test_power_is_that_of_statsmodels_and_of_the_paper():
    """0.15 is the paper's increase of the standard deviation."""
    effect = power.effect_from_sd_increase(0.15)
    for levels, n in ((2, 16), (4, 10)):
        statsmodels_power = FTestAnovaPower().power(effect, levels * n, 0.05, levels)
        assert power.power(n, levels, effect) == pytest.approx(statsmodels_power)
    # The paper reads 16 off curves for a power of 0.90; computed, 16 have 0.87, and 18 are needed.
    assert power.power(16, 2, effect) == pytest.approx(0.8745, abs=1e-4)
    assert power.smallest_n(2, effect) == 18
    assert power.power(17, 2, effect) < 0.90 <= power.power(18, 2, effect)
    assert power.smallest_n(2, 0.05) == pytest.approx(2102, abs=2)
    with pytest.raises(ValueError, match="must be more than 0"):
        power.effect_from_sd_increase(0)


def test_corrections_are_the_textbooks():
    """Bonferroni multiplies each of four p by 4; Holm the smallest by 4, then by 3, 2, 1, and keeps them ascending."""
    p = [0.01, 0.04, 0.03, 0.005]
    assert bonferroni(p) == pytest.approx([0.04, 0.16, 0.12, 0.02])
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
