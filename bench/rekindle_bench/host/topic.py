"""Measures reboots of a host under its guests, and analyses the rows."""

from rekindle_bench.topic import Throughput, Topic

from . import analysis, plan, plots, rows
from .cases import CASES
from .emulated_hosts import RECORDS, environment

TOPIC = Topic(
    name="host",
    images=("micro",),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Downtime of a guest, as a client sees it, and what it is made of (medians, s)": analysis.summary,
        "Faults: what became of guests": analysis.by_fault,
    },
    plots=plots.draw,
    throughput=Throughput(RECORDS, plots.draw_throughput),
    can_resume=True,
)
