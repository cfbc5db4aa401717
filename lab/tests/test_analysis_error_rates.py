"""How often the whole rule errs on simulated runs: differences that do not exist, and differences that are missed."""

import numpy as np
import pytest
from scipy import stats

from rekindle_lab.analysis import anova, assumptions, power
from rekindle_lab.analysis.anova import Group
from rekindle_lab.analysis.correct import bonferroni, holm


def share_rejected(experiments, make_samples, alpha=0.05):
    """Returns the share of simulated experiments in which the rule finds a difference between the levels."""
    generator = np.random.default_rng(20240610)
    rejected = 0
    for _ in range(experiments):
        samples = make_samples(generator)
        groups = [Group.of(sample) for sample in samples]
        checks = assumptions.check_equal_variances(samples)
        p = anova.welch(groups).p if any(check.p < alpha for check in checks) else anova.one_way(groups).factor.p
        rejected += p < alpha
    return rejected / experiments


ROUNDS = 800
"""Number of simulated experiments: enough for a standard error below 0.01, in a few seconds."""
NOISE = 3 * np.sqrt(0.05 * 0.95 / ROUNDS)
"""Three standard errors of a share of 0.05."""


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("normal", lambda generator: [generator.normal(10, 1, 16), generator.normal(10, 1, 16)]),
        ("unequal variances", lambda generator: [generator.normal(10, 1, 16), generator.normal(10, 6, 16)]),
        ("four levels", lambda generator: [generator.normal(10, 1, 16) for _ in range(4)]),
        ("unequal variances and numbers", lambda generator: [generator.normal(10, 6, 8), generator.normal(10, 1, 24)]),
    ],
)
def test_false_differences_are_as_rare_as_stated(what, make):
    """All levels have the same mean, so each difference found is false; 5 % are accepted."""
    assert share_rejected(ROUNDS, make) <= 0.05 + NOISE, what


def test_the_whole_rule_has_the_power_that_was_planned():
    """Two means at a distance of 2 f standard deviations have Cohen's f; 18 runs per level were planned for 0.90."""
    effect = power.effect_from_sd_increase(0.15)

    def two_levels(generator):
        return [generator.normal(0, 1, 18), generator.normal(2 * effect, 1, 18)]

    rejected = share_rejected(ROUNDS, two_levels)
    assert rejected == pytest.approx(power.power(18, 2, effect), abs=0.03)


def test_holm_and_bonferroni_keep_all_responses_together_at_alpha():
    """1000 experiments with six responses that do not differ: uncorrected, more than 15 % report a difference."""
    generator = np.random.default_rng(9)
    alarms = {"bonferroni": 0, "holm": 0, "none": 0}  # experiments in which any response seems to differ
    rounds, responses, runs_per_level = 1000, 6, 12
    level, other_level = generator.normal(size=(2, rounds, responses, runs_per_level))
    for p in stats.ttest_ind(level, other_level, axis=2).pvalue:
        for name, method in (("bonferroni", bonferroni), ("holm", holm)):
            alarms[name] += min(method(p)) < 0.05
        alarms["none"] += min(p) < 0.05
    assert alarms["none"] / rounds > 0.15
    assert alarms["bonferroni"] <= alarms["holm"]
    assert alarms["holm"] / rounds < 0.05 + 3 * np.sqrt(0.05 * 0.95 / rounds)
