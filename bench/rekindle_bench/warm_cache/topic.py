"""Measures warm-cache reboots of a guest, and analyses the rows."""

from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report

from . import analysis, plots, rows
from .cache_guests import IMAGE, environment
from .cases import CASES
from .plan import left_out

TOPIC = "warm-cache"
measure = run.Topic(TOPIC, IMAGE, rows.Row, CASES, left_out, environment).measure


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Figures 5 to 7, 11, 12: a file through a reboot (MB/s, medians)": analysis.accesses(frame),
        "Table 1: TPC-H, 22 queries (s, medians)": analysis.table_1(frame),
        "Figure 13: a web server (MB/s, medians)": analysis.web(frame),
        "Host memory at its peak through a reboot (MiB, the most)": analysis.memory(frame),
        "Figures 8 to 10: with the map against without it (medians)": analysis.costs(frame),
        "Servers without a guest (medians)": analysis.servers(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
