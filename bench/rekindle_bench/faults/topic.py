"""Runs the fault experiment: damages guests, reboots them with a warm cache, and compares every block with the disk."""

from functools import partial
from pathlib import Path

from rekindle_bench.run import Task
from rekindle_bench.topic import Topic

from . import analysis, plan, plots, rows
from .cases import CASES
from .damaged_guests import build_unchecked, environment


class FaultTopic(Topic):
    """The topic `faults`, which needs a second binary: one that does not check digests."""

    def measure(self, task: Task) -> Path:
        """Runs the cases and writes the raw files; returns the file of rows.

        Builds the binary first: if that fails, the rows of an earlier run are kept.
        """
        if task.plan.unchecked:
            build_unchecked(task.root)
        return super().measure(task)


TOPIC = FaultTopic(
    name="faults",
    images=(),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "With the check: what became of the guest, and of its blocks": partial(analysis.by_kind, checked=1),
        "Without the check (feature `unchecked-attic`)": partial(analysis.by_kind, checked=0),
        "By outcome, with the check": partial(analysis.by_outcome, checked=1),
        "By outcome, without the check": partial(analysis.by_outcome, checked=0),
    },
    plots=plots.draw,
    can_resume=True,
)
