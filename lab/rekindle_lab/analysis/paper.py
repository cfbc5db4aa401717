"""Recomputes numbers in the tables of the evaluation paper (Towards Fast OS Rejuvenation) from its other numbers.

The tables print means, standard deviations, F, t, degrees of freedom and p of hypothesis tests; many of them follow
from others. `rows` returns every number that does, with the range computed for it; `Row.agrees` compares the two.

A printed number stands for every number that is printed in the same way, rounded or truncated: `0.0046` for 0.00455 up
to 0.0047. A result computed from printed numbers is therefore a range, and agrees if it overlaps with the printed one.

The numbers below are texts, exactly as the paper prints them: each class has one kind of them and its computation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from itertools import product

from scipy import stats

from rekindle_lab.analysis.anova import Group, f_critical, one_way, t_critical, t_p, variance_ratio, welch

RUNS = 16
"""Runs per level."""
DF_ERROR = 30
"""Degrees of freedom of the error in all of the paper's analyses of variance: two levels, each with `RUNS` less 1."""


@dataclass(frozen=True)
class Span:
    """The range of numbers that a printed number may stand for, or that follows from such ranges."""

    low: float
    high: float

    def meets(self, other: "Span") -> bool:
        """Returns whether the two ranges have a number in common."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        """Formats the range, or the single number."""
        low, high = f"{self.low:.6g}", f"{self.high:.6g}"
        return low if low == high else f"{low} to {high}"


def possible_values(printed: str) -> Span:
    """Returns the range from half a last digit below a printed number to a whole one above; none is negative."""
    number = Decimal(printed)
    last_digit = float(Decimal(1).scaleb(int(number.as_tuple().exponent)))
    return Span(float(number) - last_digit / 2, float(number) + last_digit)


def range_of(function: Callable[..., float], *printed: str) -> Span:
    """Returns the range of a function of printed numbers; it must be monotonic in each argument."""
    ends = [(span.low, span.high) for span in map(possible_values, printed)]
    values = [function(*corner) for corner in product(*ends)]
    return Span(min(values), max(values))


@dataclass(frozen=True)
class Row:
    """A number printed in the paper, and the range computed from its other numbers."""

    table: str
    """Number of the paper's table, and the name of the row in it."""
    what: str
    """What the number is, and from what it was computed."""
    printed: str
    computed: Span
    whole: bool = False
    """Whether the number is whole, and so stands for itself alone."""

    @property
    def agrees(self) -> bool:
        """Whether the printed number is in the computed range."""
        number = float(self.printed)
        return self.computed.meets(Span(number, number) if self.whole else possible_values(self.printed))


@dataclass(frozen=True)
class TTest:
    """A printed t with its degrees of freedom, its p, and the critical t."""

    table: str
    t: str
    df: int
    p: str
    critical_t: str

    def rows(self) -> list[Row]:
        """Computes p from t, and the critical t from the degrees of freedom."""
        p = range_of(lambda t: t_p(t, self.df), self.t)
        critical_t = t_critical(self.df)
        return [
            Row(self.table, f"p of t = {self.t}, df = {self.df}", self.p, p),
            Row(self.table, f"critical t, df = {self.df}", self.critical_t, Span(critical_t, critical_t)),
        ]


@dataclass(frozen=True)
class FTest:
    """A printed F with 1 and 30 degrees of freedom, and its p."""

    table: str
    f: str
    p: str

    def rows(self) -> list[Row]:
        """Computes p from F."""
        p = range_of(lambda f: float(stats.f.sf(f, 1, DF_ERROR)), self.f)
        return [Row(self.table, f"p of F = {self.f}, df = 1, {DF_ERROR}", self.p, p)]


@dataclass(frozen=True)
class CriticalF:
    """The printed F that must be exceeded at 5 %, with 1 and 30 degrees of freedom."""

    table: str
    f: str

    def rows(self) -> list[Row]:
        """Computes the critical F."""
        critical_f = f_critical(1, DF_ERROR)
        return [Row(self.table, f"critical F, df = 1, {DF_ERROR}", self.f, Span(critical_f, critical_f))]


@dataclass(frozen=True)
class _Means:
    """A printed difference of two means, the two standard deviations, and the statistic computed from them."""

    table: str
    difference: str
    sd: str
    other_sd: str
    statistic: str

    def row(self, what: str, compute: Callable[[list[Group]], float]) -> Row:
        """Computes the statistic of two levels with these deviations, whose means have this difference."""

        def statistic(difference: float, sd: float, other_sd: float) -> float:
            return compute([Group(RUNS, difference, sd), Group(RUNS, 0.0, other_sd)])

        return Row(self.table, what, self.statistic, range_of(statistic, self.difference, self.sd, self.other_sd))


class MeansWithF(_Means):
    """Means whose statistic is the F of an analysis of variance."""

    def rows(self) -> list[Row]:
        """Computes F."""
        return [self.row("F of table 6's means and deviations", lambda groups: one_way(groups).factor.f)]


class MeansWithT(_Means):
    """Means whose statistic is Welch's t."""

    def rows(self) -> list[Row]:
        """Computes t."""
        return [self.row("t of table 7's means and deviations", lambda groups: welch(groups).t)]


@dataclass(frozen=True)
class Variances:
    """Two printed standard deviations (the larger one first), and the ratio of their variances."""

    table: str
    sd: str
    other_sd: str
    ratio: str

    def rows(self) -> list[Row]:
        """Computes the ratio."""

        def ratio(sd: float, other_sd: float) -> float:
            return variance_ratio(Group(RUNS, 0, sd), Group(RUNS, 0, other_sd)).ratio

        return [Row(self.table, "ratio of table 7's variances", self.ratio, range_of(ratio, self.sd, self.other_sd))]


@dataclass(frozen=True)
class Degrees:
    """A printed ratio of variances, and the degrees of freedom of Welch's t, which follow from that ratio alone."""

    table: str
    ratio: str
    df: str

    def rows(self) -> list[Row]:
        """Computes the degrees of freedom, which the paper rounds."""
        df = range_of(lambda ratio: welch([Group(RUNS, 1.0, ratio**0.5), Group(RUNS, 0.0, 1.0)]).df_error, self.ratio)
        whole_df = Span(round(df.low), round(df.high))
        return [Row(self.table, f"df of ratio {self.ratio}, rounded", self.df, whole_df, whole=True)]


@dataclass(frozen=True)
class SquaredT:
    """A printed t of two levels, and their F, which is its square."""

    table: str
    t: str
    f: str

    def rows(self) -> list[Row]:
        """Computes F."""
        return [Row(self.table, f"F = t², t = {self.t}", self.f, range_of(lambda t: t**2, self.t))]


P_OF_T = [
    TTest("4 Load3", "7.8938", 22, "2.3628E-8", "2.0738"),
    TTest("4 CPU", "4.965", 17, "0.000117", "2.1098"),
    TTest("4 I/O", "3.1508", 15, "0.00659", "2.1314"),
    TTest("4 Free Mem.", "0.0467", 15, "0.9633", "2.1314"),
    TTest("10 DOMU-Load3", "12.323", 18, "3.284E-10", "2.1009"),
    TTest("10 DOMU-CPU", "3.906", 18, "0.00103", "2.1009"),
    TTest("10 DOM0-CPU", "27", 15, "3.9305E-14", "2.13144"),
    TTest("10 DOMU-I/O", "13.6089", 16, "3.2575E-10", "2.1199"),
    TTest("10 DOM0-I/O", "0.06375", 16, "0.9499", "2.1199"),
    TTest("10 DOMU-Free Mem.", "1.611", 15, "0.1279", "2.13144"),
    TTest("10 DOM0-Free Mem.", "7.0683", 15, "3.8195E-6", "2.13144"),
]
"""Tables 4 and 10."""

P_OF_F = [
    FTest("8 Throughput", "2.547", "0.1209"),
    FTest("8 Response Time", "9.369", "0.0046"),
    FTest("9 Load3", "2.376", "0.13362"),
    FTest("11b Recovered Memory", "1.67E1", "4E-4"),
    FTest("3a Load", "1.91E-1", "6.92E-1"),
]
"""Tables 3, 8, 9 and 11."""

SUMMARIES = [
    MeansWithF("8 Throughput", "0.075", "0.1437", "0.121", "2.547"),
    MeansWithF("8 Response Time", "11.1875", "10.763", "9.893", "9.369"),
]
"""Table 8's F, with the difference and the standard deviations from table 6."""

VARIANCES = [
    Variances("10 DOMU-Load3", "0.00544", "0.0018", "8.888"),
    Variances("10 DOM0-CPU", "0.14", "0.05", "8.5711"),
    Variances("10 DOMU-I/O", "52.316", "3.029", "17.2705"),
    Variances("10 DOM0-I/O", "9.15", "1.499", "37.277"),
    Variances("10 DOMU-Free Mem.", "46979.73", "1786.15", "691.803"),
    Variances("10 DOM0-Free Mem.", "32014.66", "3680.35", "75.669"),
]
"""Table 10's ratios, with the standard deviations from table 7."""

DEGREES = [
    Degrees("4 Load3", "3.801", "22"),
    Degrees("4 CPU", "17.7381", "17"),
    Degrees("4 I/O", "63.125", "15"),
    Degrees("4 Free Mem.", "82.338", "15"),
    Degrees("10 DOMU-Load3", "8.888", "18"),
    Degrees("10 DOMU-CPU", "9.144", "18"),
    Degrees("10 DOM0-CPU", "8.5711", "15"),
    Degrees("10 DOMU-I/O", "17.2705", "16"),
    Degrees("10 DOM0-I/O", "37.277", "16"),
    Degrees("10 DOMU-Free Mem.", "691.803", "15"),
    Degrees("10 DOM0-Free Mem.", "75.669", "15"),
]
"""Tables 4 and 10."""

DIFFERENCES = [
    MeansWithT("10 DOMU-I/O", "25.16", "3.029", "52.316", "13.6089"),
    MeansWithT("10 DOM0-I/O", "0.14", "9.15", "1.499", "0.06375"),
    MeansWithT("10 DOMU-Free Mem.", "18937.41", "1786.15", "46979.73", "1.611"),
    MeansWithT("10 DOM0-Free Mem.", "56970.427", "32014.66", "3680.35", "7.0683"),
    MeansWithT("10 DOMU-Load3", "0.017", "0.00544", "0.0018", "12.323"),
]
"""Table 10's t, with the difference and the standard deviations from table 7."""

CRITICAL_F = [CriticalF("8, 9", "4.1708"), CriticalF("3, 8, 9, 11", "4.17")]
SQUARED_T = [SquaredT("5a Downtime", t="9.20E1", f="8.46E3")]


def rows() -> list[Row]:
    """Returns every number that can be computed from others in the paper."""
    printed = [*P_OF_T, *P_OF_F, *CRITICAL_F, *SUMMARIES, *VARIANCES, *DIFFERENCES, *DEGREES, *SQUARED_T]
    return [row for numbers in printed for row in numbers.rows()]
