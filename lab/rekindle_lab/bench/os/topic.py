"""Measuring and analysing, one after the other or each by itself."""

from dataclasses import replace
from pathlib import Path

from rekindle_lab import guests
from rekindle_lab.bench import run
from rekindle_lab.bench.report import Report

from . import analysis, plots, rows
from .cases import CASES
from .leak import leak_image
from .plan import FULL, QUICK, left_out
from .plan import quick as quick_plan
from .stage import IMAGE, stage

TOPIC = "os"
_TOPIC = run.Topic(TOPIC, IMAGE, rows.Row, CASES, FULL, QUICK, left_out, stage)


def measure(root: Path, out: Path, binary: Path, qemu: str, *, quick: bool, only: list[str], command: str) -> Path:
    """Run the cases and write the raw files into `out`; gives the file of rows."""
    for kind in ("debian", "immutable"):
        guests.build(root, kind)  # now, so that it is not in the time of a quick run
    leak_image(root)
    topic = replace(_TOPIC, quick=quick_plan(only))
    return topic.measure(root, out, binary, qemu, quick=quick, only=only, command=command)


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Figures, tables and plots from a file of rows and, where it is, the file that was written beside it."""
    frame = rows.read(raw)
    about = run.take_over(TOPIC, raw, out)
    found = analysis.figures(frame, run.raw_name(TOPIC))
    tables = {
        "Downtime as a client sees it (s, medians)": analysis.downtimes(frame),
        "Downtime by stages of the boot (s, medians)": analysis.stages(frame),
        "Peers, from the former guest's end on (s, medians)": analysis.peers(frame),
        "A leak of kernel memory, before and after a reboot (MiB, medians)": analysis.leaks(frame),
    }
    return run.report(TOPIC, about, command, found, plots.draw(frame, out), tables)
