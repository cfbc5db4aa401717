"""Differences of means: one-way analysis of variance, Welch's, and critical values; from samples or from summaries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    df: int
    ss: float
    f: float = math.nan
    p: float = math.nan

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


def one_way(groups: Sequence[Group], factor: str = "factor") -> Anova:
    """Computes a one-way analysis of variance from summaries."""
    if len(groups) < 2:
        raise ValueError(f"an analysis of variance needs at least 2 groups, not {len(groups)}")
    n = sum(group.n for group in groups)
    mean = sum(group.n * group.mean for group in groups) / n
    between = sum(group.n * (group.mean - mean) ** 2 for group in groups)
    within = sum((group.n - 1) * group.sd**2 for group in groups)
    return _table(factor, len(groups) - 1, between, n - len(groups), within, n - 1, between + within)


def _table(factor: str, df: int, between: float, df_error: int, within: float, df_total: int, total: float) -> Anova:
    f = (between / df) / (within / df_error) if within > 0 else math.inf if between > 0 else math.nan
    p = float(stats.f.sf(f, df, df_error)) if not math.isnan(f) else math.nan
    return Anova(
        (
            AnovaLine(factor, df, between, f, p),
            AnovaLine("error", df_error, within),
            AnovaLine("total", df_total, total),
        ),
    )


def blocked(values: Sequence[float], levels: Sequence[str], blocks: Sequence[int], factor: str = "factor") -> Anova:
    """Analyses factor and blocks without interaction; the factor's sum of squares is what it adds to the blocks."""
    y = np.asarray(values, dtype=float)
    level_columns, block_columns = _dummies(levels), _dummies(blocks)

    def residual(*parts: np.ndarray) -> tuple[float, int]:
        away, rank = _least_squares(y, *parts)
        return float((away**2).sum()), rank

    (total, _), (only_levels, rank_levels) = residual(), residual(level_columns)
    (only_blocks, rank_blocks), (both, rank) = residual(block_columns), residual(level_columns, block_columns)
    df, df_blocks, df_error = rank - rank_blocks, rank - rank_levels, y.size - rank
    if df < level_columns.shape[1] or df_blocks < 1:
        raise ValueError("levels and blocks are confounded and cannot be separated")
    if df_error < 1:
        raise ValueError(f"{y.size} values are too few for {df + 1} levels in {df_blocks + 1} blocks")
    main = _table(factor, df, only_blocks - both, df_error, both, y.size - 1, total)
    f_blocks = ((only_levels - both) / df_blocks) / main.error.ms if main.error.ms > 0 else math.nan
    p_blocks = float(stats.f.sf(f_blocks, df_blocks, df_error)) if not math.isnan(f_blocks) else math.nan
    line = AnovaLine("block", df_blocks, only_levels - both, f_blocks, p_blocks)
    return Anova((main.factor, line, *main.lines[1:]))


def fitted(values: Sequence[float], levels: Sequence[str], blocks: Sequence[int]) -> np.ndarray:
    """Returns the values that level and block predict."""
    y = np.asarray(values, dtype=float)
    return y - _least_squares(y, _dummies(levels), _dummies(blocks))[0]


def _least_squares(y: np.ndarray, *parts: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the residual sum of squares of `y`, and the rank of the explaining columns, including a constant."""
    x = np.hstack([np.ones((y.size, 1)), *parts])
    solution, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    return y - x @ solution, int(rank)


def _dummies(names: Sequence[object]) -> np.ndarray:
    distinct = list(dict.fromkeys(names))
    return np.array([[float(name == other) for other in distinct[1:]] for name in names]).reshape(len(names), -1)


@dataclass(frozen=True)
class Welch:
    """Welch's analysis of variance, which allows different variances."""

    f: float
    df: int
    df_error: float
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
    k = len(groups)
    weights = [group.n / group.sd**2 for group in groups]
    weight = sum(weights)
    mean = sum(w * group.mean for w, group in zip(weights, groups, strict=True)) / weight
    spread = sum(w * (group.mean - mean) ** 2 for w, group in zip(weights, groups, strict=True)) / (k - 1)
    tail = sum((1 - w / weight) ** 2 / (group.n - 1) for w, group in zip(weights, groups, strict=True))
    f = spread / (1 + 2 * (k - 2) / (k**2 - 1) * tail)
    df_error = (k**2 - 1) / (3 * tail)
    return Welch(f, k - 1, df_error, float(stats.f.sf(f, k - 1, df_error)))


def variance_ratio(one: Group, other: Group) -> tuple[float, float]:
    """Returns the larger variance over the smaller, and the two-sided p of that ratio under equal variances."""
    large, small = (one, other) if one.sd >= other.sd else (other, one)
    if small.sd == 0:
        raise ValueError("a ratio of variances needs groups that vary")
    ratio = (large.sd / small.sd) ** 2
    return ratio, min(1.0, 2 * float(stats.f.sf(ratio, large.n - 1, small.n - 1)))


def f_critical(df: float, df_error: float, alpha: float = 0.05) -> float:
    """Returns the F above which equality is rejected at `alpha`."""
    return float(stats.f.isf(alpha, df, df_error))


def t_critical(df: float, alpha: float = 0.05) -> float:
    """Returns the t whose absolute value must be exceeded to reject equality at `alpha`."""
    return float(stats.t.isf(alpha / 2, df))


def t_p(t: float, df: float) -> float:
    """Returns the two-sided probability of a t at least so far from 0."""
    return float(2 * stats.t.sf(abs(t), df))


def pooled_intervals(groups: Sequence[Group], error: AnovaLine, confidence: float = 0.95) -> list[tuple[float, float]]:
    """Returns each mean's interval with the error of all groups, as in the paper's "Means for one-way ANOVA"."""
    half = t_critical(error.df, 1 - confidence) * math.sqrt(error.ms)
    return [(group.mean - half / math.sqrt(group.n), group.mean + half / math.sqrt(group.n)) for group in groups]
