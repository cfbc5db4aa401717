"""Recomputes the evaluation paper's tables from its own figures, as far as those determine each other.

A printed number stands for every number that is printed in the same way, rounded or truncated: `0.0046` for 0.00455 up
to 0.0047. A result computed from printed numbers is therefore a range, and agrees if it overlaps with the printed one.
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


def spread(function: Callable[..., float], *spans: Span) -> Span:
    """Returns the range of a function that is monotonic in each argument."""
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


P_OF_T = [
    ("4 Load3", "7.8938", 22, "2.3628E-8", "2.0738"),
    ("4 CPU", "4.965", 17, "0.000117", "2.1098"),
    ("4 I/O", "3.1508", 15, "0.00659", "2.1314"),
    ("4 Free Mem.", "0.0467", 15, "0.9633", "2.1314"),
    ("10 DOMU-Load3", "12.323", 18, "3.284E-10", "2.1009"),
    ("10 DOMU-CPU", "3.906", 18, "0.00103", "2.1009"),
    ("10 DOM0-CPU", "27", 15, "3.9305E-14", "2.13144"),
    ("10 DOMU-I/O", "13.6089", 16, "3.2575E-10", "2.1199"),
    ("10 DOM0-I/O", "0.06375", 16, "0.9499", "2.1199"),
    ("10 DOMU-Free Mem.", "1.611", 15, "0.1279", "2.13144"),
    ("10 DOM0-Free Mem.", "7.0683", 15, "3.8195E-6", "2.13144"),
]
"""Table and row, t, degrees of freedom, p, critical t."""

P_OF_F = [
    ("8 Throughput", "2.547", "0.1209"),
    ("8 Response Time", "9.369", "0.0046"),
    ("9 Load3", "2.376", "0.13362"),
    ("11b Recovered Memory", "1.67E1", "4E-4"),
    ("3a Load", "1.91E-1", "6.92E-1"),
]
"""Table and row, F with 1 and 30 degrees of freedom, p."""

SUMMARIES = [
    ("8 Throughput", "0.075", "0.1437", "0.121", "2.547"),
    ("8 Response Time", "11.1875", "10.763", "9.893", "9.369"),
]
"""Table and row, difference and standard deviations from table 6, F."""

VARIANCES = [
    ("10 DOMU-Load3", "0.00544", "0.0018", "8.888"),
    ("10 DOM0-CPU", "0.14", "0.05", "8.5711"),
    ("10 DOMU-I/O", "52.316", "3.029", "17.2705"),
    ("10 DOM0-I/O", "9.15", "1.499", "37.277"),
    ("10 DOMU-Free Mem.", "46979.73", "1786.15", "691.803"),
    ("10 DOM0-Free Mem.", "32014.66", "3680.35", "75.669"),
]
"""Table and row, standard deviations from table 7 (the larger one first), ratio of variances."""

DEGREES = [
    ("4 Load3", "3.801", "22"),
    ("4 CPU", "17.7381", "17"),
    ("4 I/O", "63.125", "15"),
    ("4 Free Mem.", "82.338", "15"),
    ("10 DOMU-Load3", "8.888", "18"),
    ("10 DOMU-CPU", "9.144", "18"),
    ("10 DOM0-CPU", "8.5711", "15"),
    ("10 DOMU-I/O", "17.2705", "16"),
    ("10 DOM0-I/O", "37.277", "16"),
    ("10 DOMU-Free Mem.", "691.803", "15"),
    ("10 DOM0-Free Mem.", "75.669", "15"),
]
"""Table and row, ratio of variances, degrees of freedom of Welch's t."""

DIFFERENCES = [
    ("10 DOMU-I/O", "25.16", "3.029", "52.316", "13.6089"),
    ("10 DOM0-I/O", "0.14", "9.15", "1.499", "0.06375"),
    ("10 DOMU-Free Mem.", "18937.41", "1786.15", "46979.73", "1.611"),
    ("10 DOM0-Free Mem.", "56970.427", "32014.66", "3680.35", "7.0683"),
    ("10 DOMU-Load3", "0.017", "0.00544", "0.0018", "12.323"),
]
"""Table and row, difference and standard deviations from table 7, t."""


def _two(difference: float, sd: float, other_sd: float) -> list[Group]:
    return [Group(RUNS, difference, sd), Group(RUNS, 0.0, other_sd)]


def _degrees(ratio: float) -> float:
    return welch([Group(RUNS, 1.0, ratio**0.5), Group(RUNS, 0.0, 1.0)]).df_error


def rows() -> list[Row]:
    """Returns every number that can be computed from others in the paper."""
    found = []
    for table, t, df, p, critical in P_OF_T:
        found.append(Row(table, f"p of t = {t}, df = {df}", p, spread(lambda v, df=df: t_p(v, df), printed(t))))
        exact = t_critical(df)
        found.append(Row(table, f"critical t, df = {df}", critical, Span(exact, exact)))
    for table, f, p in P_OF_F:
        ours = spread(lambda v: float(stats.f.sf(v, 1, DF_ERROR)), printed(f))
        found.append(Row(table, f"p of F = {f}, df = 1, {DF_ERROR}", p, ours))
    for text in ("4.1708", "4.17"):
        exact = f_critical(1, DF_ERROR)
        found.append(
            Row(
                "3, 8, 9, 11" if text == "4.17" else "8, 9", f"critical F, df = 1, {DF_ERROR}", text, Span(exact, exact)
            )
        )
    for table, difference, sd, other, f in SUMMARIES:
        ours = spread(lambda *v: one_way(_two(*v)).factor.f, *map(printed, (difference, sd, other)))
        found.append(Row(table, "F of table 6's means and deviations", f, ours))
    for table, sd, other, ratio in VARIANCES:
        ours = spread(lambda a, b: variance_ratio(Group(RUNS, 0, a), Group(RUNS, 0, b))[0], printed(sd), printed(other))
        found.append(Row(table, "ratio of table 7's variances", ratio, ours))
    for table, difference, sd, other, t in DIFFERENCES:
        ours = spread(lambda *v: welch(_two(*v)).t, *map(printed, (difference, sd, other)))
        found.append(Row(table, "t of table 7's means and deviations", t, ours))
    for table, ratio, df in DEGREES:
        ours = spread(_degrees, printed(ratio))
        found.append(
            Row(table, f"df of ratio {ratio}, rounded", df, Span(round(ours.low), round(ours.high)), whole=True)
        )
    squared = spread(lambda t: t**2, printed("9.20E1"))
    found.append(Row("5a Downtime", "F = t², t = 9.20E1", "8.46E3", squared))
    return found
