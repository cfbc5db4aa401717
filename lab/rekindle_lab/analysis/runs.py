"""Reads the runs of an experiment: `runs.jsonl`, one line per run (docs/experiment-format.md).

A file with problems is rejected, with all problems at the same time, each with its row (line of the file, from 1) and
column. Two kinds of problems can be allowed, and are then noted: missing runs, and runs of several versions. Failed
runs are counted.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_lab.numbers import finite

FORMAT = 1
SHOWN = 20
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
    """The file of runs cannot be analysed. The text lists at most `SHOWN` problems, and counts the others."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.problems = problems
        lines = [f"{path}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"]
        lines += [f"  {problem}" for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"  and {len(problems) - SHOWN} more")
        kinds = {problem.kind for problem in problems}
        if kinds <= {"missing", "versions"}:
            options = " ".join(f"--allow-{kind}" for kind in sorted(kinds))
            lines.append(f"  to analyse them anyway, with a note in the report: {options}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Run:
    """One successful run with its responses."""

    row: int
    run: int
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
    planned: int
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
class Order:
    """The committed order of an experiment: its levels, and the number of runs."""

    digest: str
    factors: dict[str, list[str]]
    responses: list[str]
    planned: dict[int, tuple[dict[str, str], int]]
    """Treatment and block of each run."""
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
                document["digest"],
                {factor["name"]: [str(level) for level in factor["levels"]] for factor in document["factors"]},
                [response["name"] for response in document["responses"]],
                {run["run"]: (_as_texts(run["treatment"]), run["block"]) for run in document["runs"]},
                document.get("question", ""),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not the order of an experiment: {error!r}") from error


def load(path: Path, factor: str | None, *, allow_missing: bool, allow_versions: bool) -> Runs:
    """Reads runs, and the order from the folder of `path` if there is one."""
    order_path = path.parent / "order.json"
    order = Order.load(order_path) if order_path.exists() else None
    allow = frozenset(kind for kind, given in (("missing", allow_missing), ("versions", allow_versions)) if given)
    return read(path, order=order, factor=factor, allow=allow)


def read(
    path: Path, *, order: Order | None = None, factor: str | None = None, allow: frozenset[str] = frozenset()
) -> Runs:
    """Reads and checks runs. `order`: the plan; `allow`: kinds of problems that are noted instead of rejected."""
    problems: list[Problem] = []
    lines = list(_lines(path, problems))
    good = [(row, line) for row, line in lines if _shape(row, line, problems)]
    _one_experiment(good, order, problems)
    levels = {row: _level(row, line, order, factor, problems) for row, line in good}
    _versions(good, problems)
    attempts: dict[int, tuple[int, dict[str, Any]]] = {}
    failed: dict[int, tuple[int, dict[str, Any]]] = {}
    for row, line in good:
        if line["outcome"] == "failed":
            failed[row] = (line["run"], line)
        elif line["outcome"] != "done":
            problems.append(Problem(row, "outcome", f"'{line['outcome']}'; it must be done or failed"))
        elif line["run"] in attempts:
            other = attempts[line["run"]][0]
            problems.append(Problem(row, "run", f"run {line['run']} is done a second time; the first is row {other}"))
        else:
            attempts[line["run"]] = (row, line)
    names = _response_names(attempts, order)
    done = []
    for row, line in attempts.values():
        responses = _responses(row, line, names, problems)
        done.append(Run(row, line["run"], line["block"], levels[row], responses))
    planned = order.runs if order else max((line["of"] for _, line in good), default=0)
    last = {run: row for row, (run, _) in failed.items()}
    treatments = {line["run"]: _as_texts(line["treatment"]) for _, line in good}
    treatments |= {number: treatment for number, (treatment, _) in order.planned.items()} if order else {}
    _missing(planned, attempts, last, treatments, problems)
    if not any(problem.kind == "bad" for problem in problems):  # else maybe only a consequence
        _enough(done, {_label(treatment, factor): None for treatment in treatments.values()}, problems)
    refused = [problem for problem in problems if problem.kind not in allow]
    if refused:
        raise RunsError(path, refused)
    first = good[0][1] if good else {}
    names_of = order.factors if order else first.get("treatment", {})
    notes = [str(problem) for problem in problems if problem.kind in allow]
    if order is None:
        notes.append("no order.json next to the runs: levels and responses were not checked against it")
    return Runs(
        path=path,
        experiment=first.get("experiment", ""),
        factor=factor or ", ".join(names_of),
        planned=planned,
        done=sorted(done, key=lambda run: run.row),
        failed=[line for _, line in failed.values()],
        lines=[line for _, line in good],
        versions=dict(first.get("versions", {})),
        notes=notes,
    )


def content(path: Path) -> bytes:
    """Returns the content of a file of runs; unpacks a file whose name ends in `.gz`."""
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def _lines(path: Path, problems: list[Problem]) -> list[tuple[int, dict[str, Any]]]:
    try:
        text = content(path).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RunsError(path, [Problem(None, "-", f"cannot be read: {error}")]) from error
    found = []
    for row, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            problems.append(Problem(row, "-", f"not JSON ({error})"))
            continue
        if isinstance(value, dict):
            found.append((row, value))
        else:
            problems.append(Problem(row, "-", "not an object"))
    if not found and not problems:
        problems.append(Problem(None, "-", "the file has no runs"))
    return found


def _shape(row: int, line: dict[str, Any], problems: list[Problem]) -> bool:
    """Returns whether a line has the required keys."""
    before = len(problems)
    for key, kind in KEYS.items():
        if key not in line:
            problems.append(Problem(row, key, "is missing"))
        elif not isinstance(line[key], kind) or isinstance(line[key], bool):
            problems.append(Problem(row, key, f"{line[key]!r} is not of the kind {kind.__name__}"))
    versions = line.get("versions")
    for name, value in versions.items() if isinstance(versions, dict) else ():
        if not isinstance(value, str):
            problems.append(Problem(row, f"versions.{name}", f"{value!r} is not a text"))
    if len(problems) == before and line["format"] != FORMAT:
        problems.append(Problem(row, "format", f"{line['format']}; this program reads {FORMAT}"))
    return len(problems) == before


def _one_experiment(good: list[tuple[int, dict[str, Any]]], order: Order | None, problems: list[Problem]) -> None:
    for key in ("experiment", "order", "of"):
        wanted = order.digest if key == "order" and order else good[0][1][key] if good else None
        for row, line in good:
            if line[key] != wanted:
                problems.append(Problem(row, key, f"{line[key]!r}; expected {wanted!r}"))


def _level(row: int, line: dict[str, Any], order: Order | None, factor: str | None, problems: list[Problem]) -> str:
    treatment = _as_texts(line["treatment"])
    if order is not None:
        before = len(problems)
        for name in dict.fromkeys([*order.factors, *treatment]):
            if name not in order.factors:
                problems.append(Problem(row, f"treatment.{name}", "no such factor in the order"))
            elif name not in treatment:
                problems.append(Problem(row, f"treatment.{name}", "is missing"))
            elif treatment[name] not in order.factors[name]:
                known = ", ".join(order.factors[name])
                problems.append(Problem(row, f"treatment.{name}", f"unknown level '{treatment[name]}'; known: {known}"))
        if len(problems) == before and line["run"] in order.planned:
            planned, block = order.planned[line["run"]]
            for name in planned:
                if treatment[name] != planned[name]:
                    what = f"'{treatment[name]}'; the order has '{planned[name]}' for run {line['run']}"
                    problems.append(Problem(row, f"treatment.{name}", what))
            if line["block"] != block:
                problems.append(Problem(row, "block", f"{line['block']}; the order has {block} for run {line['run']}"))
    if factor is not None and factor not in treatment:
        problems.append(Problem(row, f"treatment.{factor}", "is missing"))
    return _label(treatment, factor)


def _as_texts(treatment: dict[str, Any]) -> dict[str, str]:
    return {name: str(level) for name, level in treatment.items()}


def _label(treatment: dict[str, str], factor: str | None) -> str:
    """Returns the name of a run's level: that of `factor`, or those of all factors."""
    if factor is not None:
        return treatment.get(factor, "")
    if len(treatment) == 1:
        return next(iter(treatment.values()))
    return ", ".join(f"{name}={level}" for name, level in treatment.items())


def _versions(good: list[tuple[int, dict[str, Any]]], problems: list[Problem]) -> None:
    names = dict.fromkeys(name for _, line in good for name in line["versions"])
    for name in names:
        # A run that failed early may have only some of the versions.
        known = [(row, line) for row, line in good if name in line["versions"] or line["outcome"] == "done"]
        seen = Counter(line["versions"].get(name) for _, line in known)
        if len(seen) > 1:
            usual = seen.most_common(1)[0][0]
            for row, line in known:
                value = line["versions"].get(name)
                if value != usual:
                    what = f"{value!r}, most runs have {usual!r}"
                    problems.append(Problem(row, f"versions.{name}", what, "versions"))


def _response_names(attempts: dict[int, tuple[int, dict[str, Any]]], order: Order | None) -> list[str]:
    if order is not None:
        return order.responses
    return list(dict.fromkeys(name for _, line in attempts.values() for name in line["responses"]))


def _responses(row: int, line: dict[str, Any], names: list[str], problems: list[Problem]) -> dict[str, float]:
    values = {}
    for name in names:
        value = line["responses"].get(name)
        column = f"responses.{name}"
        if name not in line["responses"]:
            problems.append(Problem(row, column, "is missing"))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(Problem(row, column, f"{value!r} is not a number"))
        elif not finite(value):
            problems.append(Problem(row, column, f"{value} is not a finite number"))
        else:
            values[name] = float(value)
    for name in line["responses"]:
        if name not in names:
            problems.append(Problem(row, f"responses.{name}", "no such response in the order"))
    return values


def _missing(
    planned: int,
    attempts: dict[int, tuple[int, dict[str, Any]]],
    failed: dict[int, int],
    treatments: dict[int, dict[str, str]],
    problems: list[Problem],
) -> None:
    """Checks that no run is missing. `failed`: the row of each run that failed."""
    for number in range(1, planned + 1):
        if number not in attempts:
            level = ", ".join(f"{name}={level}" for name, level in treatments.get(number, {}).items())
            which = f"run {number} of {planned}" + (f" ({level})" if level else "")
            what = f"{which} {'failed' if number in failed else 'is missing'}"
            problems.append(Problem(failed.get(number), "run", what, "missing"))
    for number, (row, _) in attempts.items():
        if not 1 <= number <= planned:
            problems.append(Problem(row, "run", f"run {number} was not planned; there are 1 to {planned}"))


def _enough(done: list[Run], levels: Iterable[str], problems: list[Problem]) -> None:
    counts = dict.fromkeys(levels, 0) | Counter(run.level for run in done)
    if len(counts) == 1:
        problems.append(Problem(None, "treatment", f"only one level, '{next(iter(counts))}': nothing to compare"))
    for level, count in counts.items():
        if count < 2:
            runs = "runs" if count == 0 else "run"
            problems.append(Problem(None, "treatment", f"level '{level}' has {count} {runs}; it needs at least 2"))
