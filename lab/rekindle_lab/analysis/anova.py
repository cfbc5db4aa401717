"""Tests whether the means of several groups (the runs of one level each) differ, and the tables of these tests.

- `one_way`: analysis of variance (ANOVA). It splits the sum of squares of all deviations from the grand mean into a
  part between the groups and a part within them (the error). F is the ratio of the two mean squares; a large F, whose
  probability p by chance is small, shows that the means differ. It assumes equal variances.
- `blocked`: the same for runs in blocks (parts of an experiment, such as days), whose differences do not count as
  error.
- `welch`: Welch's test, which allows different variances.
- `variance_ratio`, `pooled_intervals`, `f_critical`, `t_critical`, `t_p`: the further numbers of the paper's tables.

The formulas are those of Montgomery, Design and Analysis of Experiments, chapters 3 and 4, which the paper follows.
Except for `blocked`, they need only a summary of each group, so that the paper's tables can be recomputed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Group:
    """Summary of one level's values for the classical tests. `mean` and `sd` are in the response's unit."""

    n: int
    mean: float
    sd: float
    """Sample standard deviation (n - 1)."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Group":
        """Summarizes at least two values."""
        array = np.asarray(values, dtype=float)
        if array.size < 2:
            raise ValueError(f"a group needs at least 2 values, this one has {array.size}")
        return cls(array.size, float(array.mean()), float(array.std(ddof=1)))


@dataclass(frozen=True)
class AnovaLine:
    """One line of an analysis of variance. `ss` and `ms` are in the square of the response's unit."""

    source: str
    """`factor` (or its name), `block`, `error` or `total`."""
    df: int
    """Degrees of freedom."""
    ss: float
    """Sum of squares."""
    f: float = math.nan
    """Mean square over that of the error; NaN in the lines of error and total, which are not tested."""
    p: float = math.nan
    """Probability of so large an F if the means are equal."""

    @property
    def ms(self) -> float:
        """Mean square."""
        return self.ss / self.df if self.df else math.nan


@dataclass(frozen=True)
class Anova:
    """A table of an analysis of variance: the factor, blocks if there are any, error, total."""

    lines: tuple[AnovaLine, ...]

    def line(self, source: str) -> AnovaLine:
        """Returns the line named `source`."""
        return next(line for line in self.lines if line.source == source)

    @property
    def factor(self) -> AnovaLine:
        """Line of the factor, which is the first line."""
        return self.lines[0]

    @property
    def error(self) -> AnovaLine:
        """Line of the error."""
        return self.line("error")

    @property
    def has_blocks(self) -> bool:
        """Whether the analysis has blocks."""
        return any(line.source == "block" for line in self.lines)


def one_way(groups: Sequence[Group], factor: str = "factor") -> Anova:
    """Computes a one-way analysis of variance from summaries. `factor` names the first line of the table."""
    if len(groups) < 2:
        raise ValueError(f"an analysis of variance needs at least 2 groups, not {len(groups)}")
    n = sum(group.n for group in groups)
    grand_mean = sum(group.n * group.mean for group in groups) / n
    between = sum(group.n * (group.mean - grand_mean) ** 2 for group in groups)
    within = sum((group.n - 1) * group.sd**2 for group in groups)
    error = AnovaLine("error", n - len(groups), within)
    total = AnovaLine("total", n - 1, between + within)
    return Anova((_factor_line(factor, len(groups) - 1, between, error), error, total))


def _factor_line(source: str, df: int, ss: float, error: AnovaLine) -> AnovaLine:
    """Returns the line of a factor with its F test against the error."""
    without_error = math.inf if ss > 0 else math.nan  # no value deviates from the mean of its group
    f = (ss / df) / error.ms if error.ss > 0 else without_error
    p = float(stats.f.sf(f, df, error.df)) if not math.isnan(f) else math.nan
    return AnovaLine(source, df, ss, f, p)


def blocked(values: Sequence[float], levels: Sequence[str], blocks: Sequence[int], factor: str = "factor") -> Anova:
    """Analyses factor and blocks without interaction; the three sequences have an entry for each run.

    Fits the values with and without each of the two. The sum of squares of the factor is what it explains in addition
    to the blocks, and the reverse: the result is right also if levels and blocks are unevenly combined.
    """
    observed = np.asarray(values, dtype=float)
    level_columns, block_columns = _dummies(levels), _dummies(blocks)
    without_both = _fit(observed)
    by_levels, by_blocks = _fit(observed, level_columns), _fit(observed, block_columns)
    by_both = _fit(observed, level_columns, block_columns)
    df, df_blocks = by_both.rank - by_blocks.rank, by_both.rank - by_levels.rank
    df_error = observed.size - by_both.rank
    if df < level_columns.shape[1] or df_blocks < 1:
        raise ValueError("levels and blocks are confounded and cannot be separated")
    if df_error < 1:
        raise ValueError(f"{observed.size} values are too few for {df + 1} levels in {df_blocks + 1} blocks")
    error = AnovaLine("error", df_error, by_both.residual_ss)
    block_ss = by_levels.residual_ss - by_both.residual_ss
    block_line = AnovaLine("block", df_blocks, block_ss)
    if error.ms > 0:
        block_line = _factor_line("block", df_blocks, block_ss, error)
    factor_line = _factor_line(factor, df, by_blocks.residual_ss - by_both.residual_ss, error)
    return Anova((factor_line, block_line, error, AnovaLine("total", observed.size - 1, without_both.residual_ss)))


def fitted(values: Sequence[float], levels: Sequence[str], blocks: Sequence[int]) -> np.ndarray:
    """Returns the values that level and block predict."""
    observed = np.asarray(values, dtype=float)
    return observed - _fit(observed, _dummies(levels), _dummies(blocks)).residuals


class _LinearFit(NamedTuple):
    """A least-squares fit: the residuals, and the rank of the explaining columns, including a constant."""

    residuals: np.ndarray
    rank: int

    @property
    def residual_ss(self) -> float:
        """Residual sum of squares."""
        return float((self.residuals**2).sum())


def _fit(observed: np.ndarray, *columns: np.ndarray) -> _LinearFit:
    """Fits a constant and `columns` (arrays of one or more columns) to the observed values."""
    design = np.hstack([np.ones((observed.size, 1)), *columns])
    solution, _, rank, _ = np.linalg.lstsq(design, observed, rcond=None)
    return _LinearFit(observed - design @ solution, int(rank))


def _dummies(names: Sequence[object]) -> np.ndarray:
    """Returns a column for each distinct name but the first: 1 where it occurs, 0 elsewhere."""
    distinct = list(dict.fromkeys(names))
    return np.array([[float(name == column) for column in distinct[1:]] for name in names]).reshape(len(names), -1)


@dataclass(frozen=True)
class Welch:
    """Welch's analysis of variance, which allows different variances."""

    f: float
    df: int
    """Degrees of freedom of the numerator of F: levels less 1."""
    df_error: float
    """Degrees of freedom of the denominator, an estimate that need not be whole."""
    p: float

    @property
    def t(self) -> float:
        """Student's t without its sign; meaningful for two groups only."""
        return math.sqrt(self.f)


def welch(groups: Sequence[Group]) -> Welch:
    """Computes Welch's test from summaries; every group must vary. For two groups the result is Welch's t test."""
    if len(groups) < 2:
        raise ValueError(f"Welch's test needs at least 2 groups, not {len(groups)}")
    if any(group.sd == 0 for group in groups):
        raise ValueError("Welch's test needs groups that vary")
    # Welch, On the comparison of several mean values, Biometrika 38 (1951): each mean has the weight n / variance.
    levels = len(groups)
    weights = [group.n / group.sd**2 for group in groups]
    total_weight = sum(weights)
    weighted_groups = list(zip(weights, groups, strict=True))
    mean = sum(weight * group.mean for weight, group in weighted_groups) / total_weight
    between = sum(weight * (group.mean - mean) ** 2 for weight, group in weighted_groups) / (levels - 1)
    imbalance = sum((1 - weight / total_weight) ** 2 / (group.n - 1) for weight, group in weighted_groups)
    f = between / (1 + 2 * (levels - 2) / (levels**2 - 1) * imbalance)
    df_error = (levels**2 - 1) / (3 * imbalance)
    return Welch(f, levels - 1, df_error, float(stats.f.sf(f, levels - 1, df_error)))


class VarianceRatio(NamedTuple):
    """The larger variance over the smaller, and the two-sided p of that ratio under equal variances."""

    ratio: float
    p: float


def variance_ratio(group: Group, other: Group) -> VarianceRatio:
    """Compares the variances of two groups, which both must vary."""
    larger, smaller = (group, other) if group.sd >= other.sd else (other, group)
    if smaller.sd == 0:
        raise ValueError("a ratio of variances needs groups that vary")
    ratio = (larger.sd / smaller.sd) ** 2
    return VarianceRatio(ratio, min(1.0, 2 * float(stats.f.sf(ratio, larger.n - 1, smaller.n - 1))))


def f_critical(df: float, df_error: float, alpha: float = 0.05) -> float:
    """Returns the F above which equality is rejected at `alpha`."""
    return float(stats.f.isf(alpha, df, df_error))


def t_critical(df: float, alpha: float = 0.05) -> float:
    """Returns the t whose absolute value must be exceeded to reject equality at `alpha`."""
    return float(stats.t.isf(alpha / 2, df))


def t_p(t: float, df: float) -> float:
    """Returns the two-sided probability of a t at least so far from 0."""
    return float(2 * stats.t.sf(abs(t), df))


class MeanInterval(NamedTuple):
    """The confidence interval of a group's mean."""

    low: float
    high: float


def pooled_intervals(groups: Sequence[Group], error: AnovaLine, confidence: float = 0.95) -> list[MeanInterval]:
    """Returns each mean's interval with the error of all groups, as in the paper's "Means for one-way ANOVA"."""
    half_width_of_one_value = t_critical(error.df, 1 - confidence) * math.sqrt(error.ms)
    intervals = []
    for group in groups:
        half_width = half_width_of_one_value / math.sqrt(group.n)
        intervals.append(MeanInterval(group.mean - half_width, group.mean + half_width))
    return intervals
