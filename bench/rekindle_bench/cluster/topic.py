"""Measures fail-over: kills a guest's node and injects other faults, and analyses the rows."""

from rekindle_bench.topic import Topic

from . import analysis, plots, rows
from .beds import environment
from .cases import CASES
from .plan import FULL, QUICK, left_out

TOPIC = Topic(
    name="cluster",
    images=("micro",),
    row=rows.Row,
    read=rows.read,
    full=FULL,
    quick=QUICK,
    left_out=left_out,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "From a node's death to its guest's first answer elsewhere": analysis.summary,
        "Faults, and what came of them": analysis.by_kind,
        "What output commit costs (medians of windows)": analysis.output,
    },
    plots=plots.draw,
)
