"""Measures reboots of a guest's operating system, and analyses the rows."""

from dataclasses import replace
from pathlib import Path

from rekindle_bench.run import Task
from rekindle_bench.topic import Topic
from rekindle_lab.leak import leak_image

from . import analysis, plan, plots, rows
from .cases import CASES
from .rebooted_guests import IMAGE, environment


class OsTopic(Topic):
    """The topic `os`, whose quick plan contains every case that the user names."""

    def measure(self, task: Task) -> Path:
        """Runs the cases and writes the raw files; returns the file of rows."""
        leak_image(task.root)
        return super().measure(replace(task, plan=plan.quick(task.only)) if task.plan == plan.QUICK else task)


TOPIC = OsTopic(
    name="os",
    images=("debian", "immutable", IMAGE),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Downtime as a client sees it (s, medians)": analysis.downtimes,
        "Downtime by stages of the boot (s, medians)": analysis.stages,
        "Peers, from the former guest's end on (s, medians)": analysis.peers,
        "A leak of kernel memory, before and after a reboot (MiB, medians)": analysis.leaks,
    },
    plots=plots.draw,
)
