"""Measuring and analysing, one after the other or each by itself."""

import json
from pathlib import Path

from rekindle_lab import guests
from rekindle_lab.bench import run
from rekindle_lab.bench.report import Report

from . import analysis, plots, rows
from .cases import CASES
from .plan import FULL, QUICK, left_out
from .stage import stage

TOPIC = "vmm"
RECORDS = "vmm-breakdown.json"


def measure(root: Path, out: Path, binary: Path, qemu: str, *, quick: bool, only: list[str], command: str) -> Path:
    """Run the cases and write the raw files into `out`; gives the file of rows."""
    plan = QUICK if quick else FULL
    for kind in ("micro", "debian"):
        guests.build(root, kind)  # now, so that it is not in the time of a quick run
    records = []
    try:
        with (
            run.recorded(TOPIC, rows.Row, out, binary, qemu, command, left_out(plan)) as here,
            stage(root, binary, qemu, here.rows, run.cache()) as here.stage,
        ):
            records = here.stage.records
            here.stage.run(CASES, plan, only)
    finally:
        (out / RECORDS).write_text(json.dumps(records) + "\n")
    return here.rows.path


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Figures, tables and plots from a file of rows and, where they are, the files that were written beside it."""
    frame = rows.read(raw)
    about = run.take_over(TOPIC, raw, out, RECORDS)
    records = run.beside(raw, RECORDS, [])
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Guest-stopped time and service gap": analysis.summary(frame),
        "Warm against cpr-transfer (medians; ratio with its 95% interval)": analysis.versus_cpr(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, records, out), tables)
