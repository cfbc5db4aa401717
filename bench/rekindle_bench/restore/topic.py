"""Measures restores of a guest from a checkpoint, and analyses the rows."""

from pathlib import Path

from rekindle_bench import run
from rekindle_bench.protect.working_guests import IMAGE
from rekindle_bench.report import Report

from . import analysis, plots, rows
from .cases import CASES
from .crashed_guests import environment
from .plan import left_out

TOPIC = "restore"
measure = run.Topic(TOPIC, IMAGE, rows.Row, CASES, left_out, environment).measure


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Figure 4: from the command to the guest's running": analysis.summary(frame),
        "Table II: the second half of a piece of work after a restore": analysis.table_2(frame),
        "A compilation whose host died, and that went on in another place": analysis.moves(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
