"""Measures what checkpoints cost a guest, and analyses the rows."""

from rekindle_bench.topic import Topic

from . import analysis, plan, plots, rows
from .cases import CASES
from .working_guests import IMAGE, environment

TOPIC = Topic(
    name="protect",
    images=(IMAGE,),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Guest-stopped time of a checkpoint or save, the guest compiling": analysis.pauses,
        "Table I: size, commit and actual interval (medians)": analysis.table_1,
        "Figure 2: pause by policy and interval, the guest compiling": analysis.pauses_by_interval,
        "Figure 3: overhead and level of protection": analysis.overheads,
        "Memory written at a set rate (medians; a checkpoint a second)": analysis.written_rates,
    },
    plots=plots.draw,
)
