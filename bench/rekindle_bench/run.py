"""A run of a topic from start to end: `recorded` opens the files, and `run_cases` runs the cases one after the other.

Rows go into TOPIC-raw.csv, the circumstances of the run into TOPIC-run.json, a line for each case into the *ledger*,
TOPIC-runs.jsonl. From the ledger the next run learns what a killed one has left (its *leftovers*), and removes it.
"""

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rekindle_bench.case import Case, NoRoomError, NotPlannedError, Plan, Trial
from rekindle_bench.environment import Environment
from rekindle_bench.plausible import plausible_since
from rekindle_bench.rows import RowFile, read_sidecar
from rekindle_lab import guests
from rekindle_lab.machine import machine_versions, qemu_version
from rekindle_lab.rekindle import Rekindle
from rekindle_lab.runs.execute import Leftovers, RunEnd, execute, remove_remains
from rekindle_lab.runs.ledger import Ledger
from rekindle_lab.runs.workspace import Workspace

TRIAL_WORDS = "a trial: the smallest of everything, once; shows that it works, and is no measurement"

BUSY_LOAD = 0.5
"""A machine whose load average in the minute before a run is higher is not called quiet."""


@dataclass(frozen=True)
class Task:
    """The settings of a run."""

    root: Path
    """The folder of the project."""
    out: Path
    """Folder of the results."""
    binary: Path
    """The `rekindle` binary that is measured."""
    qemu: str
    plan: Any
    """The topic's own type of plan."""
    only: list[str]
    """Names of the cases to run; empty: all."""
    command: str
    """The command with which the user started it."""
    trial: Trial | None = None

    def build_images(self, *kinds: str) -> None:
        """Builds the guest images now, so that the time of a quick run does not include it."""
        for kind in () if self.trial else kinds:
            guests.build(self.root, kind)

    def left_out(self, words: Callable[[Any], list[str]]) -> list[str]:
        """Lists what the plan omits from the full plan. `words` describes a plan's omissions."""
        return [TRIAL_WORDS] if self.trial else words(self.plan)


@dataclass
class Run:
    """A run that is under way. `Topic.measure` sets `environment` once its VMs and folders can be made."""

    task: Task
    rows: RowFile
    ledger: Ledger
    left_out: list[str]
    environment: Environment | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    """Further entries for TOPIC-run.json."""
    earlier: int = 0
    """Number of lines that the ledger had before this run."""

    def cases(self, cases: Mapping[str, Case]) -> None:
        """Runs the cases in `environment`."""
        assert self.environment is not None
        self.environment.trial = self.task.trial
        run_cases(self.environment, self.ledger, cases, self.task.plan, self.task.only)

    def failed(self) -> list[str]:
        """Returns the cases of this run that ended with an error."""
        return [line["run"] for line in self.ledger.runs[self.earlier :] if line["outcome"] == "failed"]


def load_before() -> float:
    """Returns the machine's load average of the last minute, before a run begins."""
    return os.getloadavg()[0]


@contextmanager
def recorded(
    topic: str, kind: type, task: Task, left_out: Callable[[Any], list[str]], *, append: bool = False
) -> Iterator[Run]:
    """Opens the ledger, and TOPIC-raw.csv for rows of the dataclass `kind`, as new files unless `append` is true.

    Removes the remains of a killed run. Writes the circumstances of the run into TOPIC-run.json, however the body
    ends. `left_out` lists what a plan omits from the full plan.
    """
    versions = {"rekindle": Rekindle(task.binary, task.out).version(), "qemu": qemu_version(task.qemu)}
    versions |= machine_versions()
    load = load_before()
    check = plausible_since(time.time_ns() // 1000) if task.trial else None
    with Ledger(task.out, f"{topic}-") as ledger:
        remove_remains(ledger, partial(_clear, task.binary), lambda text: print(text, file=sys.stderr, flush=True))
        if not append:
            ledger.restart()
        rows = RowFile(task.out / raw_name(topic), kind, append=append, check=check)
        run = Run(task=task, rows=rows, ledger=ledger, left_out=task.left_out(left_out), earlier=len(ledger.runs))
        if load > BUSY_LOAD and not task.trial:
            run.left_out.append(f"quiet: the machine had other work when the run began (load {load:.2f})")
        errors: list[str] = []
        try:
            yield run
        except Exception as error:
            # An error outside of the cases. Rows that were measured before it count.
            errors.append(f"{topic}: {type(error).__name__}: {error}")
        finally:
            run.rows.close()
            about = {
                "command": task.command,
                "versions": versions,
                "load_before": round(load, 2),
                "left_out": run.left_out + (run.environment.left_out if run.environment else []),
                "errors": (run.environment.errors if run.environment else []) + errors,
                "failed": run.failed(),
                **run.notes,
            }
            (task.out / about_name(topic)).write_text(json.dumps(about, indent=1) + "\n")


def _clear(binary: Path, leftovers: Leftovers) -> None:
    Workspace.from_leftovers(binary, leftovers).remove()


def run_cases(env: Environment, ledger: Ledger, cases: Mapping[str, Case], plan: Plan, only: list[str]) -> None:
    """Runs all cases, or only those in `only`. Records the errors of a case, and continues with the next case."""
    for name, case in cases.items():
        reason = _reason_to_omit(env, name, plan, only)
        if reason:
            env.left_out.append(f"case {name}: {reason}")
        else:
            execute(ledger, name, lambda _: env.space.leftovers, partial(_run_case, env, name, case, plan))


def _reason_to_omit(env: Environment, name: str, plan: Plan, only: list[str]) -> str:
    if only and name not in only:
        return "not selected"
    if env.trial and name in env.trial.not_tried:
        return f"not tried: {env.trial.not_tried[name]}"
    if plan.budget_s is not None and time.monotonic() - env.began > plan.budget_s:
        return "no time left for it"
    return ""


def _run_case(env: Environment, name: str, case: Case, plan: Plan, leftovers: Leftovers) -> RunEnd:
    """Runs a case; returns its line for the ledger. A case that raises, or that appends to `env.errors`, has failed."""
    del leftovers  # the workspace of the environment, which all cases share
    errors_before, left_out_before, rows_before = len(env.errors), len(env.left_out), env.rows.count
    has_room = True
    try:
        case(env, plan)
    except NoRoomError as error:
        has_room = False
        env.left_out.append(f"case {name}: the machine {error}")
    except NotPlannedError:
        if env.trial:
            env.errors.append(f"case {name}: the plan of the trial has none of it")
        else:
            env.left_out.append(f"case {name}: not part of this plan")
    except Exception as error:
        env.errors.append(f"case {name}: {type(error).__name__}: {error}")
        env.log("".join(traceback.format_exception(error)))
    if env.trial:
        env.errors += [f"case {name}: {problem}" for problem in env.rows.take_problems()]
        if has_room and env.rows.count == rows_before and len(env.errors) == errors_before:
            env.errors.append(f"case {name}: it measured nothing")
    errors, omissions = env.errors[errors_before:], env.left_out[left_out_before:]
    rows = env.rows.count - rows_before
    outcome = "failed" if errors else "done" if rows or not omissions else "left out"
    return RunEnd(outcome, {"rows": rows, "errors": errors, "left_out": omissions})


def raw_name(topic: str) -> str:
    """Returns the name of the file of rows."""
    return f"{topic}-raw.csv"


def about_name(topic: str) -> str:
    """Returns the name of the file with a run's circumstances: versions, omissions, errors."""
    return f"{topic}-run.json"


def copy_run(topic: str, raw: Path, out: Path, *more: str) -> dict[str, Any]:
    """Copies the files of a run into `out`, unless `out` has them already. Returns the circumstances of the run.

    `more`: names of further files that may be in the folder of the rows.
    """
    if raw.resolve() != (out / raw_name(topic)).resolve():
        for name in (about_name(topic), *more):
            if (raw.parent / name).exists():
                shutil.copyfile(raw.parent / name, out / name)
        shutil.copyfile(raw, out / raw_name(topic))
    return read_sidecar(raw, about_name(topic), {})
