"""Judges an experiment: decides for each response whether the levels differ, then corrects for the number of responses.

A response is a number that every run measures, a level one of the compared ways, a block a part of the experiment in
which every level occurs. Entry points: `judge` (all responses) and `judge_response` (one response, uncorrected).

Which test decides for a response:

    a level does not vary                   permutation test: the others need a variance
    a level has fewer than 3 runs,          Welch's test: it allows different variances
      or a test of variances rejects
    otherwise                               analysis of variance, with blocks if there are any

Everything else (checks of residuals, effect sizes, pairs of levels) is reported and adds notes, but does not decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy import stats

from rekindle_lab.analysis import assumptions, effects
from rekindle_lab.analysis.anova import Anova, Group, Welch, blocked, one_way, welch
from rekindle_lab.analysis.assumptions import Check
from rekindle_lab.analysis.correct import bonferroni, holm
from rekindle_lab.analysis.effects import Effects
from rekindle_lab.analysis.runs import Runs

ALPHA = 0.05
"""Accepted probability of a false difference, unless the user gives another one."""


@dataclass(frozen=True)
class GamesHowellPair:
    """Two levels of three or more, compared by Games and Howell's p: allows for all pairs and for unequal variances."""

    level: str
    other: str
    p: float


@dataclass(frozen=True)
class ResponseResult:
    """The result for one response, without correction for the number of responses. Its fields are keys of the JSON."""

    name: str
    groups: dict[str, Group]
    """Summaries of the levels, by name."""
    equal_variances: tuple[Check, ...]
    """Tests of equal variances; empty where a level does not vary."""
    normal: Check | None
    """Test of normal residuals; `None` for fewer than 3 runs or constant residuals."""
    independent: tuple[Check, ...]
    """Tests of independent residuals; empty where they do not vary."""
    anova: Anova | None
    """`None`, as `welch`, where a level does not vary."""
    welch: Welch | None
    test: str
    """The test that decides: `anova`, `welch` or `permutation`."""
    p: float
    """p of the test that decides."""
    permutation_p: float
    effects: Effects
    versus: tuple[GamesHowellPair, ...]
    """Comparisons of pairs; empty for two levels, or where a level does not vary."""
    notes: tuple[str, ...]
    """What a reader of the result must know, such as a violated assumption."""


@dataclass(frozen=True)
class Verdict:
    """A response with the corrections for the number of all responses."""

    response: ResponseResult
    p_bonferroni: float
    p_holm: float
    alpha: float

    @property
    def differs(self) -> bool:
        """Whether the levels differ, by Holm's correction."""
        return self.p_holm < self.alpha


def judge(runs: Runs, alpha: float = ALPHA) -> list[Verdict]:
    """Judges all responses of an experiment, corrected for their number by Bonferroni and by Holm."""
    levels = [run.level for run in runs.done]
    blocks = [run.block for run in runs.done]
    responses = [
        judge_response(name, [run.responses[name] for run in runs.done], levels, blocks, alpha)
        for name in runs.responses
    ]
    uncorrected = [response.p for response in responses]
    return [
        Verdict(response, p_bonferroni, p_holm, alpha)
        for response, p_bonferroni, p_holm in zip(responses, bonferroni(uncorrected), holm(uncorrected), strict=True)
    ]


def judge_response(
    name: str,
    values: Sequence[float],
    levels: Sequence[str],
    blocks: Sequence[int] | None = None,
    alpha: float = ALPHA,
) -> ResponseResult:
    """Judges one response; `values` in the order of the runs, at least two for each of at least two levels."""
    array = np.asarray(values, dtype=float)
    samples = {level: array[np.asarray(levels) == level] for level in dict.fromkeys(levels)}
    groups = {level: Group.of(sample) for level, sample in samples.items()}
    blocks = blocks if blocks is not None and len(set(blocks)) > 1 else None
    constant_levels = [level for level, sample in samples.items() if np.ptp(sample) == 0]
    notes: list[str] = []

    anova = None
    if constant_levels:
        notes.append(_zero_variance_note(groups, constant_levels))
    else:
        anova = _analyse_variance(array, levels, blocks, groups, notes)
        blocks = blocks if anova.has_blocks else None
    residuals = assumptions.residuals(array, levels, blocks)
    permutation_p = effects.permutation_p(array, levels, blocks)

    variance_checks: tuple[Check, ...] = ()
    welch_result = None
    deciding = _DecidingTest("permutation", permutation_p)
    if anova is not None:
        variance_checks = _check_variances(samples, residuals, levels)
        welch_result = welch(list(groups.values()))
        deciding = _choose_test(anova, welch_result, variance_checks, groups, alpha, notes)
        if deciding.name == "welch" and blocks is not None:
            notes.append("Welch's test leaves blocks out; the permutation test keeps to them")

    residual_checks = _check_residuals(residuals, alpha, notes)
    effect_sizes = effects.effects(samples)
    notes += [f"{figure}: no interval, since some resamples do not vary" for figure in effect_sizes.without_interval]
    if (permutation_p < alpha) != (deciding.p < alpha):
        notes.append("the permutation test and the test that decides do not agree")
    return ResponseResult(
        name=name,
        groups=groups,
        equal_variances=variance_checks,
        normal=residual_checks.normality,
        independent=residual_checks.independence,
        anova=anova,
        welch=welch_result,
        test=deciding.name,
        p=deciding.p,
        permutation_p=permutation_p,
        effects=effect_sizes,
        versus=_compare_pairs(samples) if len(samples) > 2 and not constant_levels else (),
        notes=tuple(notes),
    )


class _DecidingTest(NamedTuple):
    """The test whose p counts for the verdict."""

    name: str
    p: float


class _ResidualChecks(NamedTuple):
    """Checks of the residuals; empty where they do not vary."""

    normality: Check | None
    independence: tuple[Check, ...]


def _zero_variance_note(groups: dict[str, Group], constant_levels: list[str]) -> str:
    constants = ", ".join(f"'{name}' is {groups[name].mean:g} in all {groups[name].n} runs" for name in constant_levels)
    return f"zero variance: {constants}; F and Welch's test do not apply, the permutation test decides"


def _analyse_variance(
    values: np.ndarray,
    levels: Sequence[str],
    blocks: Sequence[int] | None,
    groups: dict[str, Group],
    notes: list[str],
) -> Anova:
    """Analyses levels and blocks; levels alone, with a note, if the blocks cannot be separated from them."""
    if blocks is not None:
        try:
            return blocked(values, levels, blocks)
        except ValueError as error:
            notes.append(f"{error}: blocks are left out")
    return one_way(list(groups.values()))


def _check_variances(samples: dict[str, np.ndarray], residuals: np.ndarray, levels: Sequence[str]) -> tuple[Check, ...]:
    """Compares the variances of the levels' residuals, or of their values if the residuals of a level do not vary."""
    by_level = [residuals[np.asarray(levels) == level] for level in samples]
    all_vary = all(np.ptp(level_residuals) > 0 for level_residuals in by_level)
    return tuple(assumptions.check_equal_variances(by_level if all_vary else [*samples.values()]))


def _choose_test(
    anova: Anova,
    welch_result: Welch,
    variance_checks: Sequence[Check],
    groups: dict[str, Group],
    alpha: float,
    notes: list[str],
) -> _DecidingTest:
    """Chooses Welch's test if variances differ or cannot be compared, otherwise analysis of variance."""
    min_runs = assumptions.MIN_RUNS_PER_LEVEL
    rejecting_checks = [check.name for check in variance_checks if check.p < alpha]
    if min(group.n for group in groups.values()) < min_runs:
        notes.append(f"a level has fewer than {min_runs} runs, too few to compare variances: Welch's test decides")
    elif rejecting_checks:
        notes.append(f"variances differ ({', '.join(rejecting_checks)}): Welch's test decides")
    else:
        return _DecidingTest("anova", anova.factor.p)
    return _DecidingTest("welch", welch_result.p)


def _check_residuals(residuals: np.ndarray, alpha: float, notes: list[str]) -> _ResidualChecks:
    """Checks that residuals are normal and independent; these checks add notes and do not decide."""
    if np.ptp(residuals) == 0:
        return _ResidualChecks(None, ())
    normality = assumptions.check_normality(residuals) if residuals.size >= 3 else None
    if normality is not None and normality.p < alpha:
        notes.append(f"residuals are not normal ({normality.name}): see the permutation test")
    independence = tuple(assumptions.check_independence(residuals))
    if independence[0].p < alpha:
        notes.append("residuals are correlated in the order of the runs: something drifted while they ran")
    return _ResidualChecks(normality, independence)


def _compare_pairs(samples: dict[str, np.ndarray]) -> tuple[GamesHowellPair, ...]:
    # scipy's name for Games and Howell's test: Tukey's without the assumption of equal variances.
    games_howell = stats.tukey_hsd(*samples.values(), equal_var=False)
    return tuple(
        GamesHowellPair(level, other, float(games_howell.pvalue[row, column]))
        for (row, level), (column, other) in combinations(enumerate(samples), 2)
    )
