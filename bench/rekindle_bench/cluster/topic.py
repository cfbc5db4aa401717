"""Measures fail-over: kills a guest's node and injects other faults, and analyses the rows."""

from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report

from . import analysis, plots, rows
from .beds import environment
from .cases import CASES
from .plan import left_out

TOPIC = "cluster"
measure = run.Topic(TOPIC, "micro", rows.Row, CASES, left_out, environment).measure


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "From a node's death to its guest's first answer elsewhere": analysis.summary(frame),
        "Faults, and what came of them": analysis.by_kind(frame),
        "What output commit costs (medians of windows)": analysis.output(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
