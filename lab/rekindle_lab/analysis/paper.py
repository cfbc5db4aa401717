"""Recomputes the evaluation paper's tables from its own figures, as far as those determine each other.

A printed number stands for every number that is printed in the same way, rounded or truncated: `0.0046` for 0.00455 up
to 0.0047. A result computed from printed numbers is therefore a range, and agrees if it overlaps with the printed one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import NamedTuple

from scipy import stats

from rekindle_lab.analysis.anova import Group, f_critical, one_way, t_critical, t_p, variance_ratio, welch

RUNS = 16
"""Runs per level."""
DF_ERROR = 30


@dataclass(frozen=True)
class Span:
    """The range of numbers that a printed number may stand for, or that follows from such ranges."""

    low: float
    high: float

    def meets(self, other: "Span") -> bool:
        """Returns whether the two ranges have a number in common."""
        return self.low <= other.high and other.low <= self.high


def printed(text: str) -> Span:
    """Returns the range from half a last digit below a printed number to a whole one above; none is negative."""
    number = Decimal(text)
    last = float(Decimal(1).scaleb(int(number.as_tuple().exponent)))
    return Span(float(number) - last / 2, float(number) + last)


def range_of(function: Callable[..., float], *arguments: str) -> Span:
    """Returns the range of a function of printed numbers; it must be monotonic in each argument."""
    spans = [printed(argument) for argument in arguments]
    values = [function(*corner) for corner in product(*((span.low, span.high) for span in spans))]
    return Span(min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A number printed in the paper, and the range computed from its other numbers."""

    table: str
    what: str
    print: str
    ours: Span
    whole: bool = False
    """Whether the number is whole, and so stands for itself alone."""

    @property
    def agrees(self) -> bool:
        """Whether the printed number is in the computed range."""
        number = float(self.print)
        return self.ours.meets(Span(number, number) if self.whole else printed(self.print))


class PrintedT(NamedTuple):
    """A printed t with its degrees of freedom, its p, and the critical t."""

    table: str
    t: str
    df: int
    p: str
    critical_t: str


class PrintedF(NamedTuple):
    """A printed F with 1 and 30 degrees of freedom, and its p."""

    table: str
    f: str
    p: str


class PrintedMeans(NamedTuple):
    """A printed difference of means, the two standard deviations, and the statistic (F or t) computed from them."""

    table: str
    difference: str
    sd: str
    other_sd: str
    statistic: str


class PrintedVariances(NamedTuple):
    """Two printed standard deviations (the larger one first), and the ratio of their variances."""

    table: str
    sd: str
    other_sd: str
    ratio: str


class PrintedDegrees(NamedTuple):
    """A printed ratio of variances, and the degrees of freedom of Welch's t."""

    table: str
    ratio: str
    df: str


P_OF_T = [
    PrintedT("4 Load3", "7.8938", 22, "2.3628E-8", "2.0738"),
    PrintedT("4 CPU", "4.965", 17, "0.000117", "2.1098"),
    PrintedT("4 I/O", "3.1508", 15, "0.00659", "2.1314"),
    PrintedT("4 Free Mem.", "0.0467", 15, "0.9633", "2.1314"),
    PrintedT("10 DOMU-Load3", "12.323", 18, "3.284E-10", "2.1009"),
    PrintedT("10 DOMU-CPU", "3.906", 18, "0.00103", "2.1009"),
    PrintedT("10 DOM0-CPU", "27", 15, "3.9305E-14", "2.13144"),
    PrintedT("10 DOMU-I/O", "13.6089", 16, "3.2575E-10", "2.1199"),
    PrintedT("10 DOM0-I/O", "0.06375", 16, "0.9499", "2.1199"),
    PrintedT("10 DOMU-Free Mem.", "1.611", 15, "0.1279", "2.13144"),
    PrintedT("10 DOM0-Free Mem.", "7.0683", 15, "3.8195E-6", "2.13144"),
]
"""Tables 4 and 10."""

P_OF_F = [
    PrintedF("8 Throughput", "2.547", "0.1209"),
    PrintedF("8 Response Time", "9.369", "0.0046"),
    PrintedF("9 Load3", "2.376", "0.13362"),
    PrintedF("11b Recovered Memory", "1.67E1", "4E-4"),
    PrintedF("3a Load", "1.91E-1", "6.92E-1"),
]
"""Tables 3, 8, 9 and 11."""

SUMMARIES = [
    PrintedMeans("8 Throughput", "0.075", "0.1437", "0.121", "2.547"),
    PrintedMeans("8 Response Time", "11.1875", "10.763", "9.893", "9.369"),
]
"""Table 8's F, with the difference and the standard deviations from table 6."""

VARIANCES = [
    PrintedVariances("10 DOMU-Load3", "0.00544", "0.0018", "8.888"),
    PrintedVariances("10 DOM0-CPU", "0.14", "0.05", "8.5711"),
    PrintedVariances("10 DOMU-I/O", "52.316", "3.029", "17.2705"),
    PrintedVariances("10 DOM0-I/O", "9.15", "1.499", "37.277"),
    PrintedVariances("10 DOMU-Free Mem.", "46979.73", "1786.15", "691.803"),
    PrintedVariances("10 DOM0-Free Mem.", "32014.66", "3680.35", "75.669"),
]
"""Table 10's ratios, with the standard deviations from table 7."""

DEGREES = [
    PrintedDegrees("4 Load3", "3.801", "22"),
    PrintedDegrees("4 CPU", "17.7381", "17"),
    PrintedDegrees("4 I/O", "63.125", "15"),
    PrintedDegrees("4 Free Mem.", "82.338", "15"),
    PrintedDegrees("10 DOMU-Load3", "8.888", "18"),
    PrintedDegrees("10 DOMU-CPU", "9.144", "18"),
    PrintedDegrees("10 DOM0-CPU", "8.5711", "15"),
    PrintedDegrees("10 DOMU-I/O", "17.2705", "16"),
    PrintedDegrees("10 DOM0-I/O", "37.277", "16"),
    PrintedDegrees("10 DOMU-Free Mem.", "691.803", "15"),
    PrintedDegrees("10 DOM0-Free Mem.", "75.669", "15"),
]
"""Tables 4 and 10."""

DIFFERENCES = [
    PrintedMeans("10 DOMU-I/O", "25.16", "3.029", "52.316", "13.6089"),
    PrintedMeans("10 DOM0-I/O", "0.14", "9.15", "1.499", "0.06375"),
    PrintedMeans("10 DOMU-Free Mem.", "18937.41", "1786.15", "46979.73", "1.611"),
    PrintedMeans("10 DOM0-Free Mem.", "56970.427", "32014.66", "3680.35", "7.0683"),
    PrintedMeans("10 DOMU-Load3", "0.017", "0.00544", "0.0018", "12.323"),
]
"""Table 10's t, with the difference and the standard deviations from table 7."""


def rows() -> list[Row]:
    """Returns every number that can be computed from others in the paper."""
    return [*_rows_of_t(), *_rows_of_f(), *_rows_of_means_and_variances(), *_rows_of_degrees(), _row_of_squared_t()]


def _rows_of_t() -> list[Row]:
    found = []
    for line in P_OF_T:
        p = range_of(lambda t, df=line.df: t_p(t, df), line.t)
        found.append(Row(line.table, f"p of t = {line.t}, df = {line.df}", line.p, p))
        critical_t = t_critical(line.df)
        found.append(Row(line.table, f"critical t, df = {line.df}", line.critical_t, Span(critical_t, critical_t)))
    return found


def _rows_of_f() -> list[Row]:
    found = []
    for line in P_OF_F:
        p = range_of(lambda f: float(stats.f.sf(f, 1, DF_ERROR)), line.f)
        found.append(Row(line.table, f"p of F = {line.f}, df = 1, {DF_ERROR}", line.p, p))
    critical_f = f_critical(1, DF_ERROR)
    for tables, text in (("8, 9", "4.1708"), ("3, 8, 9, 11", "4.17")):
        found.append(Row(tables, f"critical F, df = 1, {DF_ERROR}", text, Span(critical_f, critical_f)))
    return found


def _rows_of_means_and_variances() -> list[Row]:
    found = []
    for line in SUMMARIES:
        f = range_of(_f_of_means, line.difference, line.sd, line.other_sd)
        found.append(Row(line.table, "F of table 6's means and deviations", line.statistic, f))
    for line in VARIANCES:
        ratio = range_of(_ratio_of_variances, line.sd, line.other_sd)
        found.append(Row(line.table, "ratio of table 7's variances", line.ratio, ratio))
    for line in DIFFERENCES:
        t = range_of(_t_of_means, line.difference, line.sd, line.other_sd)
        found.append(Row(line.table, "t of table 7's means and deviations", line.statistic, t))
    return found


def _rows_of_degrees() -> list[Row]:
    found = []
    for line in DEGREES:
        df = range_of(_degrees_of_welch, line.ratio)
        whole_df = Span(round(df.low), round(df.high))
        found.append(Row(line.table, f"df of ratio {line.ratio}, rounded", line.df, whole_df, whole=True))
    return found


def _row_of_squared_t() -> Row:
    return Row("5a Downtime", "F = t², t = 9.20E1", "8.46E3", range_of(lambda t: t**2, "9.20E1"))


def _two_groups(difference: float, sd: float, other_sd: float) -> list[Group]:
    return [Group(RUNS, difference, sd), Group(RUNS, 0.0, other_sd)]


def _f_of_means(difference: float, sd: float, other_sd: float) -> float:
    return one_way(_two_groups(difference, sd, other_sd)).factor.f


def _t_of_means(difference: float, sd: float, other_sd: float) -> float:
    return welch(_two_groups(difference, sd, other_sd)).t


def _ratio_of_variances(sd: float, other_sd: float) -> float:
    return variance_ratio(Group(RUNS, 0, sd), Group(RUNS, 0, other_sd)).ratio


def _degrees_of_welch(ratio: float) -> float:
    return welch(_two_groups(1.0, ratio**0.5, 1.0)).df_error
