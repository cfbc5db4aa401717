"""Measures fail-over: kills a guest's node and injects other faults, and analyses the rows."""

from rekindle_bench.topic import Topic

from . import analysis, plan, plots, rows
from .beds import environment
from .cases import CASES

TOPIC = Topic(
    name="cluster",
    images=("micro",),
    rows=rows,
    plans=plan,
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
