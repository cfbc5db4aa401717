"""Measures replacements of the VMM under a guest, and analyses the rows."""

from rekindle_bench.topic import Throughput, Topic

from . import analysis, plan, plots, rows
from .cases import CASES
from .twins import RECORDS, environment

TOPIC = Topic(
    name="vmm",
    images=("micro", "debian"),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Guest-stopped time and service gap": analysis.summary,
        "Warm against cpr-transfer (medians; ratio with its 95% interval)": analysis.versus_cpr,
    },
    plots=plots.draw,
    throughput=Throughput(RECORDS, plots.draw_throughput),
)
