"""Measures restores of a guest from a checkpoint, and analyses the rows."""

from rekindle_bench.protect.working_guests import IMAGE
from rekindle_bench.topic import Topic

from . import analysis, plan, plots, rows
from .cases import CASES
from .crashed_guests import environment

TOPIC = Topic(
    name="restore",
    images=(IMAGE,),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Figure 4: from the command to the guest's running": analysis.summary,
        "Table II: the second half of a piece of work after a restore": analysis.table_2,
        "A compilation whose host died, and that went on in another place": analysis.moves,
    },
    plots=plots.draw,
)
