"""Measures `rekindle metrics` with invented guests, and analyses the rows."""

from rekindle_bench.topic import Topic

from . import analysis, plan, rows
from .cases import CASES, environment

TOPIC = Topic(
    name="metrics",
    images=(),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Processor time of the server while it is scraped": analysis.costs,
        "Loads of the page": analysis.loads,
        "Time between frames while all guests change and the page is scrolled": analysis.frames,
    },
)
