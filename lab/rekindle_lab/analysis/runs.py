"""Reads and checks the runs of an experiment: `runs.jsonl`, one line per run (docs/experiment-format.md).

    {"format": 1, "experiment": "wake", "order": "sha256:...", "run": 3, "of": 32, "block": 1, "attempt": 1,
     "treatment": {"technique": "cold"}, "outcome": "done", "responses": {"downtime_s": 31.2},
     "versions": {"rekindle": "0.1.0"}, ...}

A treatment is one level of each factor; responses are the measured numbers. `order` is the digest of the order of the
runs, which was drawn and written to `order.json` before the first run; `of` is the number of runs in it.

`load` reads the file with the order next to it (`Order`), and returns `Runs`. `_Checker` has the checks: a file with
problems is rejected, with all problems at the same time, each with its row (line of the file, from 1) and column. Two
kinds of problems can be allowed, and are then noted: missing runs, and runs of several versions. Failed runs are
counted.
"""

import gzip
import json
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rekindle_lab.numbers import is_finite_number

FORMAT = 1
MAX_LISTED_PROBLEMS = 20
"""Largest number of problems that an error lists."""
KEYS = {
    "format": int,
    "experiment": str,
    "order": str,
    "run": int,
    "of": int,
    "block": int,
    "treatment": dict,
    "attempt": int,
    "outcome": str,
    "responses": dict,
    "versions": dict,
}
"""The keys that every line must have, with their types."""


@dataclass(frozen=True)
class Problem:
    """One problem of a file of runs. `row`: line of the file; `None` for a missing line or a problem of all lines."""

    row: int | None
    column: str
    what: str
    kind: str = "bad"
    """`missing` and `versions` can be allowed, `bad` cannot."""

    def __str__(self) -> str:
        """Formats row, column and the problem."""
        return f"row {self.row if self.row is not None else '-'}, column {self.column}: {self.what}"


class RunsError(ValueError):
    """The file of runs cannot be analysed. The text lists at most `MAX_LISTED_PROBLEMS`, and counts the others."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.problems = problems
        lines = [f"{path}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"]
        lines += [f"  {problem}" for problem in problems[:MAX_LISTED_PROBLEMS]]
        if len(problems) > MAX_LISTED_PROBLEMS:
            lines.append(f"  and {len(problems) - MAX_LISTED_PROBLEMS} more")
        kinds = {problem.kind for problem in problems}
        if kinds <= {"missing", "versions"}:
            options = " ".join(f"--allow-{kind}" for kind in sorted(kinds))
            lines.append(f"  to analyse them anyway, with a note in the report: {options}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Run:
    """One successful run with its responses."""

    row: int
    """Line of the file."""
    run: int
    """Number of the run in the order."""
    block: int
    level: str
    """Level of the analysed factor; without one, the levels of all factors: `a=1, b=2`."""
    responses: dict[str, float]


@dataclass
class Runs:
    """The runs of one experiment, in the order in which they ran."""

    path: Path
    experiment: str
    factor: str
    """Name of the analysed factor, or of all factors."""
    planned: int
    """Number of planned runs."""
    done: list[Run]
    failed: list[dict[str, Any]]
    """Lines of failed runs, unchanged."""
    lines: list[dict[str, Any]]
    """All lines, unchanged."""
    versions: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @property
    def levels(self) -> list[str]:
        """Levels in the order of their first run."""
        return list(dict.fromkeys(run.level for run in self.done))

    @property
    def responses(self) -> list[str]:
        """Names of the responses."""
        return list(self.done[0].responses) if self.done else []


@dataclass(frozen=True)
class PlannedRun:
    """The plan of one run: its level of each factor, and its block."""

    treatment: dict[str, str]
    block: int


@dataclass(frozen=True)
class Order:
    """The order of an experiment, as far as its runs are checked against it."""

    digest: str
    factors: dict[str, list[str]]
    """Names of the levels, by factor."""
    responses: list[str]
    """Names of the responses."""
    planned: dict[int, PlannedRun]
    """The planned runs by their numbers."""
    question: str = ""

    @property
    def runs(self) -> int:
        """Number of planned runs."""
        return len(self.planned)

    @classmethod
    def load(cls, path: Path) -> "Order":
        """Reads `order.json`. Raises `ValueError` that names the file."""
        try:
            document = json.loads(path.read_text())
            return cls(
                digest=document["digest"],
                factors={factor["name"]: [str(level) for level in factor["levels"]] for factor in document["factors"]},
                responses=[response["name"] for response in document["responses"]],
                planned={run["run"]: PlannedRun(_as_texts(run["treatment"]), run["block"]) for run in document["runs"]},
                question=document.get("question", ""),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not the order of an experiment: {error!r}") from error


def load(path: Path, factor: str | None, *, allow_missing: bool, allow_versions: bool) -> Runs:
    """Reads runs, and the order from the folder of `path` if there is one."""
    order_path = path.parent / "order.json"
    order = Order.load(order_path) if order_path.exists() else None
    allowed_kinds = {"missing": allow_missing, "versions": allow_versions}
    allow = frozenset(kind for kind, is_allowed in allowed_kinds.items() if is_allowed)
    return read(path, order=order, factor=factor, allow=allow)


def read(
    path: Path, *, order: Order | None = None, factor: str | None = None, allow: frozenset[str] = frozenset()
) -> Runs:
    """Reads and checks runs. `order`: the plan; `allow`: kinds of problems that are noted instead of rejected."""
    checker = _Checker(order, factor)
    lines = [line for line in _read_lines(path, checker) if checker.check_keys(line)]
    runs = checker.check(lines)
    rejected = [problem for problem in checker.problems if problem.kind not in allow]
    if rejected:
        raise RunsError(path, rejected)
    notes = [str(problem) for problem in checker.problems]
    if order is None:
        notes.append("no order.json next to the runs: levels and responses were not checked against it")
    first = lines[0].entries if lines else {}
    return Runs(
        path=path,
        experiment=first.get("experiment", ""),
        factor=factor or ", ".join(order.factors if order else first.get("treatment", {})),
        planned=checker.planned_runs(lines),
        done=sorted(runs, key=lambda run: run.row),
        failed=[line.entries for line in lines if line.entries["outcome"] == "failed"],
        lines=[line.entries for line in lines],
        versions=dict(first.get("versions", {})),
        notes=notes,
    )


def content(path: Path) -> bytes:
    """Returns the content of a file of runs; unpacks a file whose name ends in `.gz`."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


class _Line(NamedTuple):
    """A line of the file. `row` counts from 1."""

    row: int
    entries: dict[str, Any]


def _read_lines(path: Path, checker: "_Checker") -> list[_Line]:
    """Returns the lines that are JSON objects; reports the others to `checker`."""
    try:
        text = content(path).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RunsError(path, [Problem(None, "-", f"cannot be read: {error}")]) from error
    lines = []
    for row, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entries = json.loads(line)
        except ValueError as error:
            checker.report(row, "-", f"not JSON ({error})")
            continue
        if isinstance(entries, dict):
            lines.append(_Line(row, entries))
        else:
            checker.report(row, "-", "not an object")
    if not lines and not checker.problems:
        checker.report(None, "-", "the file has no runs")
    return lines


@dataclass
class _Checker:
    """Checks the lines of one file, against the order if there is one, and collects all problems."""

    order: Order | None
    factor: str | None
    """The analysed factor; `None`: all factors together."""
    problems: list[Problem] = field(default_factory=list)

    def report(self, row: int | None, column: str, what: str, kind: str = "bad") -> None:
        self.problems.append(Problem(row, column, what, kind))

    def check_keys(self, line: _Line) -> bool:
        """Returns whether a line has the required keys with values of the right type."""
        problems_before = len(self.problems)
        for key, kind in KEYS.items():
            if key not in line.entries:
                self.report(line.row, key, "is missing")
            elif not isinstance(line.entries[key], kind) or isinstance(line.entries[key], bool):
                self.report(line.row, key, f"{line.entries[key]!r} is not of the kind {kind.__name__}")
        versions = line.entries.get("versions")
        for name, version in versions.items() if isinstance(versions, dict) else ():
            if not isinstance(version, str):
                self.report(line.row, f"versions.{name}", f"{version!r} is not a text")
        if len(self.problems) == problems_before and line.entries["format"] != FORMAT:
            self.report(line.row, "format", f"{line.entries['format']}; this program reads {FORMAT}")
        return len(self.problems) == problems_before

    def check(self, lines: list[_Line]) -> list[Run]:
        """Checks lines that have the required keys; returns the successful runs."""
        self._check_same_experiment(lines)
        levels = {line.row: self._check_treatment(line) for line in lines}
        self._check_versions(lines)
        line_of_run = self._successful_lines_by_run(lines)
        response_names = self._response_names(line_of_run)
        runs = [
            Run(
                row=line.row,
                run=number,
                block=line.entries["block"],
                level=levels[line.row],
                responses=self._check_responses(line, response_names),
            )
            for number, line in line_of_run.items()
        ]
        treatments = {line.entries["run"]: _as_texts(line.entries["treatment"]) for line in lines}
        if self.order:
            treatments |= {number: planned.treatment for number, planned in self.order.planned.items()}
        self._check_none_is_missing(lines, line_of_run, treatments)
        if not any(problem.kind == "bad" for problem in self.problems):  # too few runs may follow from other problems
            self._check_enough_runs(runs, [_label(treatment, self.factor) for treatment in treatments.values()])
        return runs

    def planned_runs(self, lines: list[_Line]) -> int:
        """Returns the number of planned runs: of the order or, without one, the largest that a line names."""
        return self.order.runs if self.order else max((line.entries["of"] for line in lines), default=0)

    def _check_same_experiment(self, lines: list[_Line]) -> None:
        if not lines:
            return
        for key in ("experiment", "order", "of"):
            expected = self.order.digest if key == "order" and self.order else lines[0].entries[key]
            for line in lines:
                if line.entries[key] != expected:
                    self.report(line.row, key, f"{line.entries[key]!r}; expected {expected!r}")

    def _check_treatment(self, line: _Line) -> str:
        """Checks a run's levels and block; returns the name of its level."""
        treatment = _as_texts(line.entries["treatment"])
        if self.order is not None:
            problems_before = len(self.problems)
            self._check_levels(line.row, treatment, self.order)
            planned = self.order.planned.get(line.entries["run"])
            if len(self.problems) == problems_before and planned is not None:
                self._check_as_planned(line, treatment, planned)
        if self.factor is not None and self.factor not in treatment:
            self.report(line.row, f"treatment.{self.factor}", "is missing")
        return _label(treatment, self.factor)

    def _check_levels(self, row: int, treatment: dict[str, str], order: Order) -> None:
        for factor in dict.fromkeys([*order.factors, *treatment]):
            column = f"treatment.{factor}"
            if factor not in order.factors:
                self.report(row, column, "no such factor in the order")
            elif factor not in treatment:
                self.report(row, column, "is missing")
            elif treatment[factor] not in order.factors[factor]:
                known = ", ".join(order.factors[factor])
                self.report(row, column, f"unknown level '{treatment[factor]}'; known: {known}")

    def _check_as_planned(self, line: _Line, treatment: dict[str, str], planned: PlannedRun) -> None:
        number, block = line.entries["run"], line.entries["block"]
        for factor, level in planned.treatment.items():
            if treatment[factor] != level:
                difference = f"'{treatment[factor]}'; the order has '{level}' for run {number}"
                self.report(line.row, f"treatment.{factor}", difference)
        if block != planned.block:
            self.report(line.row, "block", f"{block}; the order has {planned.block} for run {number}")

    def _check_versions(self, lines: list[_Line]) -> None:
        """Checks that all runs are of the same versions."""
        for name in dict.fromkeys(name for line in lines for name in line.entries["versions"]):
            # A run that failed early may have only some of the versions.
            version_of_row = {
                line.row: line.entries["versions"].get(name)
                for line in lines
                if name in line.entries["versions"] or line.entries["outcome"] == "done"
            }
            usual = Counter(version_of_row.values()).most_common(1)[0][0]
            for row, version in version_of_row.items():
                if version != usual:
                    self.report(row, f"versions.{name}", f"{version!r}, most runs have {usual!r}", "versions")

    def _successful_lines_by_run(self, lines: list[_Line]) -> dict[int, _Line]:
        """Returns the successful attempt of each run, by the run's number."""
        line_of_run: dict[int, _Line] = {}
        for line in lines:
            number, outcome = line.entries["run"], line.entries["outcome"]
            if outcome not in ("done", "failed"):
                self.report(line.row, "outcome", f"'{outcome}'; it must be done or failed")
            elif outcome == "done" and number in line_of_run:
                first_row = line_of_run[number].row
                self.report(line.row, "run", f"run {number} is done a second time; the first is row {first_row}")
            elif outcome == "done":
                line_of_run[number] = line
        return line_of_run

    def _response_names(self, line_of_run: dict[int, _Line]) -> list[str]:
        if self.order is not None:
            return self.order.responses
        return list(dict.fromkeys(name for line in line_of_run.values() for name in line.entries["responses"]))

    def _check_responses(self, line: _Line, names: list[str]) -> dict[str, float]:
        """Returns the responses of a run that are finite numbers; reports the others."""
        responses = line.entries["responses"]
        values = {}
        for name in names:
            value = responses.get(name)
            column = f"responses.{name}"
            if name not in responses:
                self.report(line.row, column, "is missing")
            elif isinstance(value, bool) or not isinstance(value, int | float):
                self.report(line.row, column, f"{value!r} is not a number")
            elif not is_finite_number(value):
                self.report(line.row, column, f"{value} is not a finite number")
            else:
                values[name] = float(value)
        for name in responses:
            if name not in names:
                self.report(line.row, f"responses.{name}", "no such response in the order")
        return values

    def _check_none_is_missing(
        self, lines: list[_Line], line_of_run: dict[int, _Line], treatments: dict[int, dict[str, str]]
    ) -> None:
        planned = self.planned_runs(lines)
        row_of_failure = {line.entries["run"]: line.row for line in lines if line.entries["outcome"] == "failed"}
        for number in range(1, planned + 1):
            if number not in line_of_run:
                levels = ", ".join(f"{factor}={level}" for factor, level in treatments.get(number, {}).items())
                run = f"run {number} of {planned}" + (f" ({levels})" if levels else "")
                row = row_of_failure.get(number)
                self.report(row, "run", f"{run} {'is missing' if row is None else 'failed'}", "missing")
        for number, line in line_of_run.items():
            if not 1 <= number <= planned:
                self.report(line.row, "run", f"run {number} was not planned; there are 1 to {planned}")

    def _check_enough_runs(self, runs: list[Run], levels: list[str]) -> None:
        counts = dict.fromkeys(levels, 0) | Counter(run.level for run in runs)
        if len(counts) == 1:
            self.report(None, "treatment", f"only one level, '{next(iter(counts))}': nothing to compare")
        for level, count in counts.items():
            if count < 2:
                noun = "runs" if count == 0 else "run"
                self.report(None, "treatment", f"level '{level}' has {count} {noun}; it needs at least 2")


def _as_texts(treatment: dict[str, Any]) -> dict[str, str]:
    return {factor: str(level) for factor, level in treatment.items()}


def _label(treatment: dict[str, str], factor: str | None) -> str:
    """Returns the name of a run's level: that of `factor`, or those of all factors."""
    if factor is not None:
        return treatment.get(factor, "")
    if len(treatment) == 1:
        return next(iter(treatment.values()))
    return ", ".join(f"{factor}={level}" for factor, level in treatment.items())
