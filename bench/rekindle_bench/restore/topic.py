"""Measures restores of a guest from a checkpoint, and analyses the rows."""

from rekindle_bench.protect.working_guests import IMAGE
from rekindle_bench.topic import Topic

from . import analysis, plots, rows
from .cases import CASES
from .crashed_guests import environment
from .plan import FULL, QUICK, left_out

TOPIC = Topic(
    name="restore",
    images=(IMAGE,),
    row=rows.Row,
    read=rows.read,
    full=FULL,
    quick=QUICK,
    left_out=left_out,
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
