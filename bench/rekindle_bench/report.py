"""The report of a topic: figures with their bars, as JSON for machines and as a table for the terminal.

A *figure* is one number, such as a median or the ratio of two medians; its *bar* is the limit that it must meet. An
analysis collects figures in `Findings`, from samples (lists of measured values); `Report` adds tables and the
circumstances of the run.
"""

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
class Sample:
    """Measured values, and what was measured, such as `warm, 512M`."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True)
class Contrast:
    """The comparison of a sample of ours with a second one: of a peer, or of Rekindle in another situation."""

    result: Comparison
    unit: str
    """Unit of both samples."""
    ours_is: str
    peer_is: str
    """What the second sample is, also if it is not a peer's."""
    with_peer: bool = True
    """Whether the second sample is a peer's. A comparison of Rekindle with itself cannot be lost: it has no verdict."""

    @classmethod
    def of(cls, ours: Sample, peer: Sample, unit: str, *, with_peer: bool = True) -> "Contrast":
        """Compares the medians of two samples."""
        return cls(compare(ours.values, peer.values), unit, ours.label, peer.label, with_peer)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number that a topic reports, with the limit that it must meet."""

    id: str
    value: float
    """In `unit`; for a ratio, ours divided by the peer's."""
    unit: str
    n: int
    """Number of measured values behind `value`."""
    p95: float
    """95th percentile of the same values; for a ratio, ours divided by the peer's."""
    bar: Bar
    raw: str
    """Name of the file of rows."""
    contrast: Contrast | None = None
    ratio_bar: Bar | None = None
    """Second bar, for the ratio of `contrast`, where `value` is not that ratio."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers for the JSON, by name."""
    planned: int | None = None
    """Planned number of values, where fewer prove nothing: with fewer values the bar is missed, whatever `value` is."""

    @property
    def met(self) -> bool:
        """Whether every bar is met, and as many values as planned were measured."""
        if self.planned is not None and self.n < self.planned:
            return False
        ratio_met = self.ratio_bar is None or (
            self.contrast is not None and self.ratio_bar.met(self.contrast.result.ratio)
        )
        return self.bar.met(self.value) and ratio_met

    @property
    def verdict(self) -> str:
        """Verdict of the comparison with a peer, inverted where more is better; empty without a peer."""
        if self.contrast is None or not self.contrast.with_peer:
            return ""
        verdict = self.contrast.result.verdict
        inverted = {"better": "worse", "worse": "better"} if self.bar.op == ">=" else {}
        return inverted.get(verdict, verdict)

    def as_json(self) -> dict[str, Any]:
        """Returns the figure's entry under `figures`."""
        document: dict[str, Any] = {
            "value": _rounded(self.value),
            "unit": self.unit,
            "n": self.n,
            "p95": _rounded(self.p95),
            "bar": str(self.bar),
            "met": self.met,
            "ratio_of": None,
            "raw": self.raw,
        }
        if self.contrast is not None:
            result = self.contrast.result
            document["ratio_of"] = {"ours": _rounded(result.ours), "peer": _rounded(result.peer)}
            document |= {
                "ratio_of_unit": self.contrast.unit,
                "ours_is": self.contrast.ours_is,
                "peer_is": self.contrast.peer_is,
                "ratio": _rounded(result.ratio),
                "ratio_ci95": [_rounded(result.low), _rounded(result.high)],
                "permutation_p": _rounded(result.p),
                "n_peer": result.n_peer,
            }
            if self.contrast.with_peer:
                document["verdict"] = self.verdict
        if self.ratio_bar is not None:
            document["ratio_bar"] = str(self.ratio_bar)
        if self.planned is not None:
            document["planned"] = self.planned
        return document | {name: _rounded(number) for name, number in self.extra.items()}


@dataclass
class Findings:
    """The figures that an analysis has found in the rows, and the figures without rows."""

    raw: str
    """Name of the file of rows."""
    figures: list[Figure] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Lines for the report, mostly of figures that have no rows."""

    def add(self, name: str, values: Sequence[float], unit: str, bar: Bar, **details: Any) -> None:  # noqa: ANN401
        """Adds the figure of measured values: their median, number and p95. `details`: fields of `Figure` to change."""
        fields = {"value": median(values), "n": len(values), "p95": p95(values), **details}
        self.figures.append(Figure(id=name, unit=unit, bar=bar, raw=self.raw, **fields))

    def add_ratio(
        self,
        name: str,
        bar: Bar,
        *,
        ours: Sample,
        peer: Sample,
        unit: str = "ms",
        with_peer: bool = True,
        extra: dict[str, float] | None = None,
    ) -> None:
        """Adds the ratio of the medians of two samples in `unit`; reports a sample without values as missing."""
        without_rows = [sample.label for sample in (ours, peer) if not sample.values]
        if without_rows:
            self.report_missing(name, " and ".join(without_rows))
            return
        contrast = Contrast.of(ours, peer, unit, with_peer=with_peer)
        result = contrast.result
        self.figures.append(
            Figure(
                id=name,
                value=result.ratio,
                unit="",
                n=min(result.n_ours, result.n_peer),
                p95=result.ours_p95 / result.peer_p95,
                bar=bar,
                raw=self.raw,
                contrast=contrast,
                extra=extra or {},
            )
        )

    def report_missing(self, name: str, what: str = "") -> None:
        """Records that a figure has no rows, or none for `what`."""
        self.absent.append(f"figure {name}: no rows{f' for {what}' if what else ''}")


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
    """Versions of the measured programs, by name."""
    figures: list[Figure]
    left_out: list[str] = field(default_factory=list)
    """What this run omits, compared with the full plan on a machine that can run everything."""
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
    """Returns the figure's row of the table `Against the bars`."""
    line = {
        "figure": figure.id,
        "value": f"{figure.value:.3g} {figure.unit}".strip(),
        "bar": str(figure.bar) + (f"; ratio {figure.ratio_bar}" if figure.ratio_bar else ""),
        "": "" if figure.bar == NO_BAR else "met" if figure.met else "MISSED",
        "n": figure.n if figure.planned in (None, figure.n) else f"{figure.n} of {figure.planned}",
    }
    contrast = figure.contrast
    if contrast is None:
        return line | dict.fromkeys(("ours", "peer", "ratio", "95%", "ours is"), "")
    result = contrast.result
    return line | {
        "ours": f"{result.ours:.3g} {contrast.unit} ({contrast.ours_is})",
        "peer": f"{result.peer:.3g} {contrast.unit} ({contrast.peer_is})",
        "ratio": f"{result.ratio:.3g}",
        "95%": f"{result.low:.3g} to {result.high:.3g}",
        "ours is": figure.verdict,
    }
