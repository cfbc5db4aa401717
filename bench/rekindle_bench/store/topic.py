"""Measures checkpoints in an object store, and analyses the rows."""

from rekindle_bench.restore.crashed_guests import environment
from rekindle_bench.topic import Topic

from . import analysis, plan, rows
from .cases import CASES, IMAGE

TOPIC = Topic(
    name="store",
    images=(IMAGE,),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Commit of a checkpoint against a plain PUT, by turns": analysis.commits,
        "Restores from each kind of store, by turns": analysis.restores,
        "Races of two hosts for a store": analysis.races,
    },
)
