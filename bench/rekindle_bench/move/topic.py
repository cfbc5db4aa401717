"""Measures moves of a running guest to another host, and analyses the rows."""

from pathlib import Path

from rekindle_bench import run
from rekindle_bench.protect.working_guests import environment
from rekindle_bench.report import Report
from rekindle_lab.models.moves import TABLE

from . import analysis, rows
from .cases import CASES, IMAGE
from .plan import left_out

TOPIC = "move"
measure = run.Topic(TOPIC, IMAGE, rows.Row, CASES, left_out, environment).measure


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures and tables from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        TABLE: analysis.summary(frame),
        "What a move's guest is stopped for": analysis.pauses(frame),
        "What the other host does in `there`": analysis.there(frame),
    }
    return run.report(TOPIC, about, command, found, [], tables)
