"""Measures moves of a running guest to another host, and analyses the rows."""

from rekindle_bench.protect.working_guests import environment
from rekindle_bench.topic import Topic
from rekindle_lab.models.moves import TABLE

from . import analysis, plan, rows
from .cases import CASES, IMAGE

TOPIC = Topic(
    name="move",
    images=(IMAGE,),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        TABLE: analysis.summary,
        "What a move's guest is stopped for": analysis.pauses,
        "What the other host does in `there`": analysis.there,
    },
)
