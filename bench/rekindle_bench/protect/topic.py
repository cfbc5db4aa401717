"""Measures what checkpoints cost a guest, and analyses the rows."""

from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report

from . import analysis, plots, rows
from .cases import CASES
from .plan import left_out
from .working_guests import IMAGE, environment

TOPIC = "protect"
measure = run.Topic(TOPIC, IMAGE, rows.Row, CASES, left_out, environment).measure


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Guest-stopped time of a checkpoint or save, the guest compiling": analysis.pauses(frame),
        "Table I: size, commit and actual interval (medians)": analysis.table_1(frame),
        "Figure 2: pause by policy and interval, the guest compiling": analysis.pauses_by_interval(frame),
        "Figure 3: overhead and level of protection": analysis.overheads(frame),
        "Memory written at a set rate (medians; a checkpoint a second)": analysis.written_rates(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
