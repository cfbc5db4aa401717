"""Measures replacements and checkpoints of libvirt domains, and analyses the rows."""

from rekindle_bench.topic import Topic

from . import analysis, losses, overlays, plan, plots, rows
from .cases import CASES
from .domains import IMAGE, environment

TOPIC = Topic(
    name="libvirt",
    images=(IMAGE, losses.IMAGE, overlays.IMAGE),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Replacements: guest-stopped time and service gap": analysis.summary,
        "What a replacement's guest is stopped for": analysis.stops,
        "Time in which libvirt does not answer": analysis.absences,
        "Pauses of checkpoints": analysis.pauses,
        "Disks with overlays": analysis.disks,
        "Restores into libvirt": analysis.restores,
        "Operations of libvirt on each kind of domain": analysis.operations,
    },
    plots=plots.draw,
)
