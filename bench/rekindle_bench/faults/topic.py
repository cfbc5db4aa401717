"""Runs the fault experiment: damages guests, reboots them with a warm cache, and compares every block with the disk."""

import os
import subprocess
from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report
from rekindle_lab.machine import cache

from . import analysis, plots, rows
from .cases import CASES
from .damaged_guests import environment
from .plan import left_out

TOPIC = "faults"


def measure(task: run.Task) -> Path:
    """Runs the case and writes the raw files; returns the file of rows.

    `RESUME=1` in the environment continues with the existing rows. `REKINDLE_UNCHECKED`: path of a binary with the
    feature `unchecked-attic`, which is built if the variable is not set.
    """
    raw = task.out / run.raw_name(TOPIC)
    resumed = bool(os.environ.get("RESUME")) and raw.exists()
    done: dict[tuple[str, int], int] = {}
    if resumed:
        for (kind, checked), group in rows.read(raw).groupby(["kind", "checked"]):
            done[kind, int(checked)] = len(group)
    unchecked = build_unchecked(task.root) if task.plan.unchecked else None
    with (
        run.recorded(TOPIC, rows.Row, task, left_out, append=resumed) as here,
        environment(task.root, task.binary, unchecked, task.qemu, here.rows, cache(), done) as here.environment,
    ):
        here.environment.fault_image()
        here.cases(CASES)
    return raw


def build_unchecked(root: Path) -> Path:
    """Returns a binary that does not check digests: `REKINDLE_UNCHECKED`, or built in a separate target directory."""
    given = os.environ.get("REKINDLE_UNCHECKED")
    if given:
        return Path(given)
    target = root / "target" / "unchecked"
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--package", "rekindle"]
    command += ["--features", "unchecked-attic", "--target-dir", str(target)]
    subprocess.run(command, cwd=root, check=True)
    return target / "release" / "rekindle"


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "With the check: what became of the guest, and of its blocks": analysis.by_kind(frame, 1),
        "Without the check (feature `unchecked-attic`)": analysis.by_kind(frame, 0),
        "By outcome, with the check": analysis.by_outcome(frame, 1),
        "By outcome, without the check": analysis.by_outcome(frame, 0),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
