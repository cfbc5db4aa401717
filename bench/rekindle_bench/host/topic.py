"""Measures reboots of a host under its guests, and analyses the rows."""

import json
import os
from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report
from rekindle_lab.machine import cache

from . import analysis, plots, rows
from .cases import CASES
from .emulated_hosts import Done, environment
from .plan import left_out

TOPIC = "host"
RECORDS = "host-breakdown.json"


def measure(task: run.Task) -> Path:
    """Runs the cases and writes the raw files; returns the file of rows.

    `RESUME=1` in the environment continues with the existing rows, since a reboot takes a minute or more.
    """
    raw = task.out / run.raw_name(TOPIC)
    resumed = bool(os.environ.get("RESUME")) and raw.exists()
    done = rounds(raw) if resumed else {}
    records = run.read_sidecar(raw, RECORDS, []) if resumed else []
    task.build_images("micro")
    try:
        with (
            run.recorded(TOPIC, rows.Row, task, left_out, append=resumed) as here,
            environment(task.root, task.binary, task.qemu, here.rows, cache(), task.plan, done) as here.environment,
        ):
            here.environment.records = records
            here.cases(CASES)
    finally:
        (task.out / RECORDS).write_text(json.dumps(records) + "\n")
    return raw


def rounds(raw: Path) -> Done:
    """Counts, for each kind of reboot, the reboots that have all their rows in a file."""
    frame = rows.read(raw)
    keys = ["case", "how", "vms", "memory_mib", "where"]
    whole = frame.groupby([*keys, "round"]).size().reset_index(name="rows")
    whole = whole[whole["rows"] >= whole["vms"]]
    return {
        (str(case), str(how), int(vms), int(mib), str(where)): int(group["round"].max()) + 1
        for (case, how, vms, mib, where), group in whole.groupby(keys)
    }


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the other files of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out, RECORDS)
    records = run.read_sidecar(raw, RECORDS, [])
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Downtime of a guest, as a client sees it, and what it is made of (medians, s)": analysis.summary(frame),
        "Faults: what became of guests": analysis.by_fault(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, records, out), tables)
