"""A topic of the benchmarks: how it is measured, and how its rows become a report.

A topic is a package such as `vmm`; its module `topic` makes the one `Topic` from the package's other modules.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from rekindle_bench import run
from rekindle_bench.case import Case, Plan
from rekindle_bench.environment import Environment, Setup
from rekindle_bench.report import Findings, Report
from rekindle_bench.rows import read_sidecar
from rekindle_bench.run import Task
from rekindle_lab.machine import cache

Table = list[dict[str, object]]
"""Rows of a table, each by the titles of its columns."""
Analysis = Callable[[pd.DataFrame], Table]
"""Makes a table from the measured rows."""


class RowsModule(Protocol):
    """The module `rows` of a topic."""

    Row: type
    """Dataclass of the rows in the raw file."""

    def read(self, path: Path) -> pd.DataFrame:
        """Reads the raw file."""


class PlansModule(Protocol):
    """The module `plan` of a topic."""

    FULL: Plan
    QUICK: Plan
    """Ends within 8 minutes."""

    def left_out(self, plan: Any) -> list[str]:  # noqa: ANN401
        """Lists what a plan omits from the full plan."""


@dataclass(frozen=True)
class Throughput:
    """The client's throughput during single reboots, which is kept in a file of its own (figure 8)."""

    file: str
    """Name of the file, in the folder of the rows."""
    plot: Callable[[list[dict[str, Any]], Path], list[str]]
    """Draws the records of the file into a folder, and returns the names of the plots."""


@dataclass(frozen=True, kw_only=True)
class Topic:
    """A topic: its cases and their environment, and the analysis of their rows."""

    name: str
    """As on the command line and in the names of files."""
    images: tuple[str, ...]
    """Kinds of the guests' images, built before the run."""
    rows: RowsModule
    plans: PlansModule
    cases: Mapping[str, Case]
    environment: Callable[[Setup], AbstractContextManager[Environment]]
    figures: Callable[[pd.DataFrame, str], Findings]
    """Makes the figures from the rows and the name of the raw file."""
    tables: Mapping[str, Analysis]
    """Makes the tables, by title."""
    plots: Callable[[pd.DataFrame, Path], list[str]] | None = None
    """Draws the plots that have data into a folder, and returns their file names."""
    throughput: Throughput | None = None
    can_resume: bool = False
    """Whether `RESUME=1` in the environment continues with the rows of an earlier run."""

    def measure(self, task: Task) -> Path:
        """Runs the cases and writes the raw files; returns the file of rows."""
        task.build_images(*self.images)
        raw = task.out / run.raw_name(self.name)
        is_resumed = self.can_resume and bool(os.environ.get("RESUME")) and raw.exists()
        if self.throughput and not is_resumed:
            # A run that fails early must not be drawn with the records of an earlier one.
            (task.out / self.throughput.file).unlink(missing_ok=True)
        with run.recorded(self.name, self.rows.Row, task, self.plans.left_out, append=is_resumed) as current:
            setup = Setup(
                root=task.root, binary=task.binary, qemu=task.qemu, rows=current.rows, disk=cache(), plan=task.plan
            )
            with self.environment(setup) as current.environment:
                current.cases(self.cases)
        return raw

    def analyse(self, raw: Path, out: Path, command: str) -> Report:
        """Makes figures, tables and plots from a file of rows and, if present, the other files of the run."""
        frame = self.rows.read(raw)
        about = run.copy_run(self.name, raw, out, *([self.throughput.file] if self.throughput else []))
        findings = self.figures(frame, run.raw_name(self.name))
        plots = self.plots(frame, out) if self.plots else []
        if self.throughput:
            plots += self.throughput.plot(read_sidecar(raw, self.throughput.file, []), out)
        tables = {title: analysis(frame) for title, analysis in self.tables.items()}
        return report(self.name, about, command, findings, plots, tables)


def bare_report(topic: str, about: dict[str, Any], command: str, errors: list[str]) -> Report:
    """Makes a report without figures, for a run that cannot be analysed. `about`: its circumstances."""
    bare = report(topic, about, command, Findings(""), [], {})
    bare.errors += errors
    return bare


def report(
    topic: str, about: dict[str, Any], command: str, findings: Findings, plots: list[str], tables: dict[str, Table]
) -> Report:
    """Makes the report of a run. `about`: from `copy_run`; `command`: used if `about` has none."""
    return Report(
        topic=topic,
        command=about.get("command", command),
        versions=about.get("versions", {}),
        figures=findings.figures,
        left_out=[*about.get("left_out", []), *findings.absent],
        errors=about.get("errors", []),
        failed=about.get("failed", []),
        plots=plots,
        tables=tables,
    )
