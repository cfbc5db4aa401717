"""The report of a topic: figures with their bars, as JSON for machines and as a table for the terminal."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rekindle_lab.stats import Comparison, compare, median, p95
from rekindle_lab.tables import pipes, table


@dataclass(frozen=True)
class Bar:
    """The limit that a figure must meet."""

    limit: float
    op: Literal["<=", "<", "==", ">="] = "<="

    def met(self, value: float) -> bool:
        """Returns whether `value` meets the limit."""
        limit = self.limit
        return {"<=": value <= limit, "<": value < limit, "==": value == limit, ">=": value >= limit}[self.op]

    def __str__(self) -> str:
        """Formats the bar for tables: operator and limit, or `none`."""
        return "none" if self == NO_BAR else f"{self.op} {self.limit:g}"


NO_BAR = Bar(math.inf)
"""Bar of a figure that is reported without a requirement."""


@dataclass(frozen=True)
class Figure:
    """One figure. `value` and `p95` are in `unit`; for a ratio, both are ours divided by the peer's."""

    id: str
    value: float
    unit: str
    n: int
    p95: float
    bar: Bar
    raw: str
    of: Comparison | None = None
    of_unit: str = ""
    ours_is: str = ""
    peer_is: str = ""
    ratio_bar: Bar | None = None
    """Second bar, for `of.ratio`, where `value` is not that ratio."""
    of_peer: bool = True
    """Whether `of` compares Rekindle with a peer. A comparison of Rekindle with itself cannot be lost."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers for the JSON, by name."""
    planned: int | None = None
    """Planned number of values, where fewer prove nothing: with fewer values the bar is missed, whatever `value` is."""

    @property
    def met(self) -> bool:
        """Whether every bar is met, and as many values as planned were measured."""
        if self.planned is not None and self.n < self.planned:
            return False
        ratio_met = self.ratio_bar is None or (self.of is not None and self.ratio_bar.met(self.of.ratio))
        return self.bar.met(self.value) and ratio_met

    @property
    def verdict(self) -> str:
        """Verdict of `of`, inverted where more is better."""
        if self.of is None:
            return ""
        turned = {"better": "worse", "worse": "better"} if self.bar.op == ">=" else {}
        return turned.get(self.of.verdict, self.of.verdict)

    def as_json(self) -> dict[str, Any]:
        """Returns the figure's entry under `figures`."""
        out: dict[str, Any] = {
            "value": _rounded(self.value),
            "unit": self.unit,
            "n": self.n,
            "p95": _rounded(self.p95),
            "bar": str(self.bar),
            "met": self.met,
            "ratio_of": None,
            "raw": self.raw,
        }
        if self.of is not None:
            out["ratio_of"] = {"ours": _rounded(self.of.ours), "peer": _rounded(self.of.peer)}
            out |= {
                "ratio_of_unit": self.of_unit,
                "ours_is": self.ours_is,
                "peer_is": self.peer_is,
                "ratio": _rounded(self.of.ratio),
                "ratio_ci95": [_rounded(self.of.low), _rounded(self.of.high)],
                "permutation_p": _rounded(self.of.p),
                "n_peer": self.of.n_peer,
            }
            if self.of_peer:
                out["verdict"] = self.verdict
        if self.ratio_bar is not None:
            out["ratio_bar"] = str(self.ratio_bar)
        if self.planned is not None:
            out["planned"] = self.planned
        return out | {key: _rounded(value) for key, value in self.extra.items()}


@dataclass
class Findings:
    """The figures, and the names of figures without rows."""

    raw: str
    """Name of the file of rows."""
    figures: list[Figure] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        """Adds a figure."""
        self.figures.append(figure)

    def add_sample(
        self,
        name: str,
        unit: str,
        sample: Sequence[float],
        bar: Bar,
        *,
        value: float | None = None,
        extra: dict[str, float] | None = None,
    ) -> None:
        """Adds the figure of a sample: its median, or `value` if given, with the size and the p95 of the sample."""
        value = median(sample) if value is None else value
        self.add(Figure(name, value, unit, len(sample), p95(sample), bar, self.raw, extra=extra or {}))

    def report_missing(self, name: str, what: str = "") -> None:
        """Records that a figure has no rows, or none for `what`."""
        self.absent.append(f"figure {name}: no rows{f' for {what}' if what else ''}")

    def ratio(
        self,
        name: str,
        bar: Bar,
        ours: Sequence[float],
        peer: Sequence[float],
        ours_is: str,
        peer_is: str,
        of_peer: bool = True,
        unit: str = "ms",
        extra: dict[str, float] | None = None,
    ) -> None:
        """Adds the ratio of two samples' medians, both in `unit`, as a figure."""
        if not ours or not peer:
            without_rows = [
                name_of_sample for name_of_sample, sample in ((ours_is, ours), (peer_is, peer)) if not sample
            ]
            self.report_missing(name, " and ".join(without_rows))
            return
        of = compare(ours, peer)
        tail = of.ours_p95 / of.peer_p95
        n = min(of.n_ours, of.n_peer)
        self.add(
            Figure(
                name,
                of.ratio,
                "",
                n,
                tail,
                bar,
                self.raw,
                of,
                unit,
                ours_is,
                peer_is,
                of_peer=of_peer,
                extra=extra or {},
            )
        )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _finite(value: Any) -> Any:  # noqa: ANN401
    """Replaces infinite and undefined numbers, for which JSON has no value, by `None`."""
    if isinstance(value, dict):
        return {key: _finite(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Report:
    """All results of one run of a topic."""

    topic: str
    command: str
    versions: dict[str, str]
    figures: list[Figure]
    left_out: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Cases that ended with an error."""
    plots: list[str] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Rows of further tables, by title."""

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON that `make bench` promises."""
        return {
            "topic": self.topic,
            "versions": self.versions,
            "command": self.command,
            "figures": {figure.id: figure.as_json() for figure in self.figures},
            "left_out": self.left_out,
            "failed": self.failed,
            "errors": self.errors,
            "plots": self.plots,
            "tables": self.tables,
        }

    def text(self) -> str:
        """Formats the tables for the terminal."""
        parts = [table(rows, title) for title, rows in self.tables.items() if rows]
        parts.append(table([_line(figure) for figure in self.figures], "Against the bars"))
        for title, lines in (("Left out", self.left_out), ("Errors", self.errors)):
            if lines:
                parts.append(f"{title}:\n" + "\n".join(f"  {line}" for line in lines))
        return "\n\n".join(parts)

    def markdown(self) -> str:
        """Formats the report as a page for `bench/results/`: no figure of the page is written by hand."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        parts = [f"# Topic `{self.topic}`: measured", f"Made by `{self.command}`, on: {versions or 'not known'}."]
        parts += ["## Against the bars", pipes([_line(figure) for figure in self.figures])]
        for title, rows in self.tables.items():
            if rows:
                parts += [f"## {title}", pipes(rows)]
        for title, lines in (("Left out", self.left_out), ("Errors", self.errors)):
            if lines:
                parts += [f"## {title}", "\n".join(f"- {line}" for line in lines)]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: Path) -> str:
        """Writes TOPIC.json and TOPIC.md, and returns the content of the JSON as one line."""
        line = json.dumps(_finite(self.as_json()), allow_nan=False)
        (folder / f"{self.topic}.json").write_text(line + "\n")
        (folder / f"{self.topic}.md").write_text(self.markdown())
        return line


def _line(figure: Figure) -> dict[str, Any]:
    bars = str(figure.bar) + (f"; ratio {figure.ratio_bar}" if figure.ratio_bar else "")
    line = {
        "figure": figure.id,
        "value": f"{figure.value:.3g} {figure.unit}".strip(),
        "bar": bars,
        "": "" if figure.bar == NO_BAR else "met" if figure.met else "MISSED",
        "n": figure.n if figure.planned in (None, figure.n) else f"{figure.n} of {figure.planned}",
        "ours": "",
        "peer": "",
        "ratio": "",
        "95%": "",
        "ours is": "",
    }
    if figure.of is not None:
        line |= {
            "ours": f"{figure.of.ours:.3g} {figure.of_unit} ({figure.ours_is})",
            "peer": f"{figure.of.peer:.3g} {figure.of_unit} ({figure.peer_is})",
            "ratio": f"{figure.of.ratio:.3g}",
            "95%": f"{figure.of.low:.3g} to {figure.of.high:.3g}",
            "ours is": figure.verdict if figure.of_peer else "",
        }
    return line
