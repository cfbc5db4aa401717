"""A run from beginning to end: raw rows into a file, and beside it what they do not say; both are read again."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_lab import guests
from rekindle_lab.bench.plausible import plausible_since
from rekindle_lab.bench.report import Found, Report, machine_versions, qemu_version
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.bench.stage import Stage, Trial
from rekindle_lab.rekindle import Rekindle

TRIAL_WORDS = "a trial: the smallest of everything, once; shows that it works, and is no measurement"
BUSY_LOAD = 0.5
"""A machine that had more to do than this in the last minute (load average) before a run is not called quiet."""


@dataclass(frozen=True)
class Task:
    """What a run is asked for."""

    root: Path
    """The folder of the project."""
    out: Path
    """Where results go."""
    binary: Path
    """The `rekindle` that is measured."""
    qemu: str
    plan: Any
    """One of the topic's."""
    only: list[str]
    """Cases; empty: all."""
    command: str
    """By which the user started it."""
    trial: Trial | None = None

    def build_images(self, *kinds: str) -> None:
        """Build the guest images now, so that it is not in the time of a quick run."""
        for kind in () if self.trial else kinds:
            guests.build(self.root, kind)

    def left_out(self, words: Callable[[Any], list[str]]) -> list[str]:
        """What the plan leaves out of the full one. `words` puts that into words."""
        return [TRIAL_WORDS] if self.trial else words(self.plan)


@dataclass
class Run:
    """A run that is under way. `stage` is set by the topic once it stands."""

    task: Task
    rows: RowFile
    left_out: list[str]
    stage: Stage | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """What else is to be told; each goes to TOPIC-run.json."""

    def cases(self, cases: Mapping[str, Callable[[Any, Any], None]]) -> None:
        """Run the cases on the stage."""
        assert self.stage is not None
        self.stage.trial = self.task.trial
        self.stage.run(cases, self.task.plan, self.task.only)


def cache() -> Path:
    """A folder on a real disk that outlives runs."""
    return Path(os.environ.get("REKINDLE_CACHE") or Path.home() / ".cache" / "rekindle")


def load_before() -> float:
    """What the machine has to do beside us: its load average of the last minute, before a run begins."""
    return os.getloadavg()[0]


@contextmanager
def recorded(
    topic: str, kind: type, task: Task, left_out: Callable[[Any], list[str]], *, append: bool = False
) -> Iterator[Run]:
    """Rows of `kind` go to TOPIC-raw.csv, which begins anew unless they are to be appended.

    However the body ends, TOPIC-run.json has the rest. `left_out` says what a plan leaves out of the full one.
    """
    versions = {"rekindle": Rekindle(task.binary, task.out).version(), "qemu": qemu_version(task.qemu)}
    versions |= machine_versions()
    load = load_before()
    check = plausible_since(time.time_ns() // 1000) if task.trial else None
    rows = RowFile(task.out / raw_name(topic), kind, append=append, check=check)
    run = Run(task, rows, task.left_out(left_out))
    if load > BUSY_LOAD and not task.trial:
        run.left_out.append(f"quiet: the machine had other work when the run began (load {load:.2f})")
    errors: list[str] = []
    try:
        yield run
    except Exception as error:
        # Outside of the cases. What was measured before counts.
        errors.append(f"{topic}: {type(error).__name__}: {error}")
    finally:
        run.rows.close()
        about = {
            "command": task.command,
            "versions": versions,
            "load_before": round(load, 2),
            "left_out": run.left_out + (run.stage.left_out if run.stage else []),
            "errors": (run.stage.errors if run.stage else []) + errors,
            "failed": run.stage.failed if run.stage else [],
            **run.notes,
        }
        (task.out / about_name(topic)).write_text(json.dumps(about, indent=1) + "\n")


@dataclass(frozen=True)
class Topic:
    """What is measured under one name, and where."""

    name: str
    image: str
    """The guest's."""
    row: type
    """Of the raw file."""
    cases: Mapping[str, Callable[[Any, Any], None]]
    left_out: Callable[[Any], list[str]]
    """What a plan does not do of the full one, in words."""
    stage: Callable[[Path, Path, str, RowFile, Path], AbstractContextManager[Stage]]
    """From the project's folder, the binary, QEMU, where rows go, and a folder on a real disk."""

    def measure(self, task: Task) -> Path:
        """Run the cases and write the raw files; gives the file of rows."""
        task.build_images(self.image)
        with (
            recorded(self.name, self.row, task, self.left_out) as here,
            self.stage(task.root, task.binary, task.qemu, here.rows, cache()) as here.stage,
        ):
            here.cases(self.cases)
        return task.out / raw_name(self.name)


def raw_name(topic: str) -> str:
    """The file of rows."""
    return f"{topic}-raw.csv"


def about_name(topic: str) -> str:
    """The file with what the rows do not say: versions, what was left out, what went wrong."""
    return f"{topic}-run.json"


def take_over(topic: str, raw: Path, out: Path, *more: str) -> dict[str, Any]:
    """Copy the files of a run into `out` unless they are there, and give what is known of it.

    `more`: names of further files that may be beside the rows.
    """
    if raw.resolve() != (out / raw_name(topic)).resolve():
        for name in (about_name(topic), *more):
            if (raw.parent / name).exists():
                shutil.copyfile(raw.parent / name, out / name)
        shutil.copyfile(raw, out / raw_name(topic))
    return beside(raw, about_name(topic), {})


def beside(raw: Path, name: str, default: Any) -> Any:  # noqa: ANN401
    """The JSON of a file beside the rows, or `default` where there is none."""
    path = raw.parent / name
    return json.loads(path.read_text()) if path.exists() else default


def bare_report(topic: str, about: dict[str, Any], command: str, errors: list[str]) -> Report:
    """A report without figures, of a run that cannot be analysed. `about`: what is known of it."""
    made = report(topic, about, command, Found(""), [], {})
    made.errors += errors
    return made


def report(
    topic: str,
    about: dict[str, Any],
    command: str,
    found: Found,
    plots: list[str],
    tables: dict[str, list[dict[str, object]]],
) -> Report:
    """What is told of a run. `about`: from `take_over`; `command`: where that does not say it."""
    return Report(
        topic=topic,
        command=about.get("command", command),
        versions=about.get("versions", {}),
        figures=found.figures,
        left_out=[*about.get("left_out", []), *found.absent],
        errors=about.get("errors", []),
        failed=about.get("failed", []),
        plots=plots,
        tables=tables,
    )
