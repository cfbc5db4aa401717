"""Measures reboots of a guest's operating system, and analyses the rows."""

from dataclasses import replace
from pathlib import Path

from rekindle_bench import run
from rekindle_bench.report import Report
from rekindle_lab.leak import leak_image

from . import analysis, plots, rows
from .cases import CASES
from .plan import QUICK, left_out, quick
from .rebooted_guests import IMAGE, environment

TOPIC = "os"
_TOPIC = run.Topic(TOPIC, IMAGE, rows.Row, CASES, left_out, environment)


def measure(task: run.Task) -> Path:
    """Runs the cases and writes the raw files; returns the file of rows."""
    task.build_images("debian", "immutable")
    leak_image(task.root)
    return _TOPIC.measure(replace(task, plan=quick(task.only)) if task.plan == QUICK else task)


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Makes figures, tables and plots from a file of rows and, if present, the TOPIC-run.json of the run."""
    frame = rows.read(raw)
    about = run.copy_run(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Downtime as a client sees it (s, medians)": analysis.downtimes(frame),
        "Downtime by stages of the boot (s, medians)": analysis.stages(frame),
        "Peers, from the former guest's end on (s, medians)": analysis.peers(frame),
        "A leak of kernel memory, before and after a reboot (MiB, medians)": analysis.leaks(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
