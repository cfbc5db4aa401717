"""Tables of a judgement, laid out as tables 3 to 11 of the paper (Towards Fast OS Rejuvenation).

A table is a list of rows; a row maps the heading of each column to its cell: a text, a number, a `PValue` or a
`Spread`. `of_response` makes all tables of a response, `summary` and `verdicts_table` those of all responses together.
Then `for_people` formats the cells for the terminal, Markdown and HTML, or `for_machines` keeps numbers with all
digits.
"""

import math
from dataclasses import dataclass
from typing import Any

from rekindle_lab.analysis.anova import f_critical, pooled_intervals, t_critical
from rekindle_lab.analysis.effects import Interval
from rekindle_lab.analysis.judge import ResponseResult, Verdict

Rows = list[dict[str, Any]]

LIKE_THE_PAPERS = {
    "Averages": "6 and 7",
    "One-way ANOVA": "3, 5b, 8, 9 and 11",
    "Means for one-way ANOVA": "3, 5b and 11",
    "Welch's test": "4, 5a and 10",
}
"""Tables of the paper whose layout each of our tables has, by our titles."""

UNITS = {"pct": "%", "s": "s", "ms": "ms", "us": "µs", "kib": "KiB", "mib": "MiB", "bytes": "B", "d": "days"}
"""Units of responses, by the last part of a response's name."""


def heading(name: str) -> str:
    """Formats a response's name for people: `response_time_ms` is "response time (ms)"."""
    words, _, unit = name.rpartition("_")
    if words.endswith("_per"):
        return f"{words[:-4]} (1/{unit})".replace("_", " ")
    return (f"{words} ({UNITS[unit]})" if words and unit in UNITS else name).replace("_", " ")


def p_text(p: float) -> str:
    """Formats a p-value as in the paper: `0.0123`, or `1.2345E-06` below 0.0001."""
    if math.isnan(p):
        return ""
    return f"{p:.4f}" if p >= 1e-4 else f"{p:.4E}"


class PValue(float):
    """A p-value in a cell."""


@dataclass(frozen=True)
class Spread:
    """A figure with its interval in a cell; a share (to 1) can be shown in percent."""

    interval: Interval | None
    percent: bool = False


def for_people(rows: Rows) -> Rows:
    """Formats p-values and intervals as texts."""

    def formatted(value: object) -> object:
        if isinstance(value, PValue):
            return p_text(value)
        return interval_text(value.interval, percent=value.percent) if isinstance(value, Spread) else value

    return [{name: formatted(value) for name, value in row.items()} for row in rows]


def for_machines(rows: Rows) -> Rows:
    """Returns rows of numbers: an interval has a column for its value and one for each end; `None` where missing."""
    flat_rows = []
    for row in rows:
        columns: dict[str, Any] = {}
        for name, value in row.items():
            if isinstance(value, Spread):
                interval = value.interval or Interval(math.nan)
                columns |= {name: None, f"{name} low": interval.low, f"{name} high": interval.high}
                value = interval.value
            columns[name] = None if isinstance(value, float) and math.isnan(value) else value
        flat_rows.append(columns)
    return flat_rows


def summary(verdicts: list[Verdict]) -> Rows:
    """Lays out tables 6 and 7: averages and standard deviations, and the difference of two levels."""
    rows: Rows = []
    for verdict in verdicts:
        response = verdict.response
        label = heading(response.name)
        groups = response.groups
        average: dict[str, Any] = {
            "response": f"Avg. {label}",
            **{level: group.mean for level, group in groups.items()},
        }
        if len(groups) == 2:
            first, second = groups.values()
            average["Diff."] = first.mean - second.mean
        rows += [average, {"response": f"Std. Dev. {label}", **{level: group.sd for level, group in groups.items()}}]
    return rows


def verdicts_table(verdicts: list[Verdict]) -> Rows:
    """Summarizes all responses: the deciding test, its p and the corrected ones, the permutation p, effect."""
    return [
        {
            "response": heading(verdict.response.name),
            "test": verdict.response.test,
            "P-value": PValue(verdict.response.p),
            "Bonferroni": PValue(verdict.p_bonferroni),
            "Holm": PValue(verdict.p_holm),
            "permutation": PValue(verdict.response.permutation_p),
            "omega²": Spread(verdict.response.effects.omega_squared),
            f"differs at {verdict.alpha:g}": "yes" if verdict.differs else "no",
        }
        for verdict in verdicts
    ]


def anova(response: ResponseResult, factor: str, alpha: float) -> Rows:
    """Lays out tables 3, 5b, 8, 9 and 11: source, df, SS, MS, F, P-value, F crit."""
    if response.anova is None:
        return []
    error = response.anova.error
    rows = []
    for line in response.anova.lines:
        tested = not math.isnan(line.f)
        rows.append(
            {
                "Source": factor if line is response.anova.factor else line.source,
                "df": line.df,
                "SS": line.ss,
                "MS": line.ms if line.source != "total" else None,
                "F": line.f if tested else None,
                "P-value": PValue(line.p),
                "F crit": f_critical(line.df, error.df, alpha) if tested else None,
            }
        )
    return rows


def means(response: ResponseResult) -> Rows:
    """Lays out "Means for one-way ANOVA" of tables 3, 5 and 11. The interval uses the error of all levels."""
    rows: Rows = [
        {"Level": level, "n": group.n, "Avg": group.mean, "Std Dev": group.sd}
        for level, group in response.groups.items()
    ]
    if response.anova is not None:
        intervals = pooled_intervals(list(response.groups.values()), response.anova.error)
        for row, interval in zip(rows, intervals, strict=True):
            row |= {"95%CI-": interval.low, "95%CI+": interval.high}
    return rows


def welch(response: ResponseResult, alpha: float) -> Rows:
    """Lays out tables 4, 5a and 10: ratio of variances, t, degrees of freedom, critical t and p."""
    result = response.welch
    if result is None:
        return []
    if len(response.groups) > 2:
        return [
            {
                "F": result.f,
                "df": result.df,
                "Den. df": result.df_error,
                "F crit": f_critical(result.df, result.df_error, alpha),
                "P-value": PValue(result.p),
            }
        ]
    variance_ratio = next(check for check in response.equal_variances if check.name == "F of variances")
    return [
        {
            "F-ratio": variance_ratio.statistic,
            "Test t": result.t,
            "Num. df": result.df_error,
            "T crit": t_critical(result.df_error, alpha),
            "P-value": PValue(result.p),
        }
    ]


def assumptions(response: ResponseResult) -> Rows:
    """Lists the tests of the assumptions of analysis of variance."""
    checks_by_assumption = {
        "equal variances": response.equal_variances,
        "normal residuals": (response.normal,) if response.normal else (),
        "independent runs": response.independent,
    }
    return [
        {"assumption": assumption, "test": check.name, "statistic": check.statistic, "P-value": PValue(check.p)}
        for assumption, checks in checks_by_assumption.items()
        for check in checks
    ]


def pairs(response: ResponseResult) -> Rows:
    """Lists each pair of levels: difference, relative difference and Hedges' g, with 95 % bootstrap intervals."""
    games_howell_p = {(pair.level, pair.other): pair.p for pair in response.versus}
    rows = []
    for pair in response.effects.pairs:
        row = {
            "levels": f"{pair.level} - {pair.other}",
            "difference": Spread(pair.difference),
            "relative": Spread(pair.relative, percent=True),
            "Hedges' g": Spread(pair.hedges_g),
        }
        if games_howell_p:
            row["Games-Howell P"] = PValue(games_howell_p[pair.level, pair.other])
        rows.append(row)
    return rows


def interval_text(interval: Interval | None, *, percent: bool = False) -> str:
    """Formats an interval: `1.2 (0.8 to 1.5)`; `1.2` without one."""
    if interval is None:
        return ""

    def formatted(value: float) -> str:
        return f"{100 * value:.3g} %" if percent else f"{value:.4g}"

    if interval.low is None or interval.high is None:
        return formatted(interval.value)
    return f"{formatted(interval.value)} ({formatted(interval.low)} to {formatted(interval.high)})"


def of_response(response: ResponseResult, factor: str, alpha: float) -> dict[str, Rows]:
    """Returns all tables of a response by their titles; the table `notes` explains why others are omitted."""
    titled = {
        "One-way ANOVA": anova(response, factor, alpha),
        "Means for one-way ANOVA": means(response),
        "Welch's test": welch(response, alpha),
        "Assumptions": assumptions(response),
        "Differences (95 % bootstrap intervals)": pairs(response),
    }
    return {title: rows for title, rows in titled.items() if rows}
