"""Measures replacements of the VMM under a guest, and analyses the rows."""

import json
from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report
from rekindle_lab.machine import cache

from . import analysis, plots, rows
from .cases import CASES
from .plan import left_out
from .twins import environment

TOPIC = "vmm"
RECORDS = "vmm-breakdown.json"


def measure(task: run.Task) -> Path:
    """Runs the cases and writes the raw files; returns the file of rows."""
    task.build_images("micro", "debian")
    records = []
    try:
        with (
            run.recorded(TOPIC, rows.Row, task, left_out) as here,
            environment(task.root, task.binary, task.qemu, here.rows, cache()) as here.environment,
        ):
            records = here.environment.records
            here.cases(CASES)
    finally:
        (task.out / RECORDS).write_text(json.dumps(records) + "\n")
    return task.out / run.raw_name(TOPIC)


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the other files of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out, RECORDS)
    records = run.read_sidecar(raw, RECORDS, [])
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Guest-stopped time and service gap": analysis.summary(frame),
        "Warm against cpr-transfer (medians; ratio with its 95% interval)": analysis.versus_cpr(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, records, out), tables)
