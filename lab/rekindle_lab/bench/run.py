"""A run from beginning to end: raw rows into a file, and beside it what they do not say; both are read again."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_lab import guests
from rekindle_lab.bench.report import Found, Report, machine_versions, qemu_version
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.bench.stage import Plan, Stage
from rekindle_lab.rekindle import Rekindle

BUSY_LOAD = 0.5
"""A machine that had more to do than this in the last minute (load average) before a run is not called quiet."""


@dataclass
class Run:
    """A run that is under way. `stage` is set by the topic once it stands."""

    rows: RowFile
    left_out: list[str]
    stage: Stage | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """What else is to be told; each goes to TOPIC-run.json."""


def cache() -> Path:
    """A folder on a real disk that outlives runs."""
    return Path(os.environ.get("REKINDLE_CACHE") or Path.home() / ".cache" / "rekindle")


def load_before() -> float:
    """What the machine has to do beside us: its load average of the last minute, before a run begins."""
    return os.getloadavg()[0]


@contextmanager
def recorded(
    topic: str,
    kind: type,
    out: Path,
    binary: Path,
    qemu: str,
    command: str,
    left_out: list[str],
    *,
    append: bool = False,
) -> Iterator[Run]:
    """Rows of `kind` go to TOPIC-raw.csv, which begins anew unless they are to be appended.

    However the body ends, TOPIC-run.json has the rest.
    """
    versions = {"rekindle": Rekindle(binary, out).version(), "qemu": qemu_version(qemu), **machine_versions()}
    load = load_before()
    run = Run(RowFile(out / raw_name(topic), kind, append=append), left_out)
    if load > BUSY_LOAD:
        run.left_out.append(f"quiet: the machine had other work when the run began (load {load:.2f})")
    try:
        yield run
    finally:
        run.rows.close()
        about = {
            "command": command,
            "versions": versions,
            "load_before": round(load, 2),
            "left_out": run.left_out + (run.stage.left_out if run.stage else []),
            "errors": run.stage.errors if run.stage else [],
            **run.notes,
        }
        (out / about_name(topic)).write_text(json.dumps(about, indent=1) + "\n")


@dataclass(frozen=True)
class Topic:
    """What is measured under one name, and where."""

    name: str
    image: str
    """The guest's."""
    row: type
    """Of the raw file."""
    cases: Mapping[str, Callable[[Any, Any], None]]
    full: Plan
    quick: Plan
    left_out: Callable[[Any], list[str]]
    """What a plan does not do of the full one, in words."""
    stage: Callable[[Path, Path, str, RowFile, Path], AbstractContextManager[Stage]]
    """From the project's folder, the binary, QEMU, where rows go, and a folder on a real disk."""

    def measure(
        self, root: Path, out: Path, binary: Path, qemu: str, *, quick: bool, only: list[str], command: str
    ) -> Path:
        """Run the cases and write the raw files into `out`; gives the file of rows."""
        plan = self.quick if quick else self.full
        guests.build(root, self.image)  # now, so that it is not in the time of a quick run
        with (
            recorded(self.name, self.row, out, binary, qemu, command, self.left_out(plan)) as here,
            self.stage(root, binary, qemu, here.rows, cache()) as here.stage,
        ):
            here.stage.run(self.cases, plan, only)
        return here.rows.path


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
        plots=plots,
        tables=tables,
    )
