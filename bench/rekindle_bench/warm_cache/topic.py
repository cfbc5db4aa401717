"""Measures warm-cache reboots of a guest, and analyses the rows."""

from rekindle_bench.topic import Topic

from . import analysis, plan, plots, rows
from .cache_guests import IMAGE, environment
from .cases import CASES

TOPIC = Topic(
    name="warm-cache",
    images=(IMAGE,),
    rows=rows,
    plans=plan,
    cases=CASES,
    environment=environment,
    figures=analysis.figures,
    tables={
        "Figures 5 to 7, 11, 12: a file through a reboot (MB/s, medians)": analysis.accesses,
        "Table 1: TPC-H, 22 queries (s, medians)": analysis.table_1,
        "Figure 13: a web server (MB/s, medians)": analysis.web,
        "Host memory at its peak through a reboot (MiB, the most)": analysis.memory,
        "Figures 8 to 10: with the map against without it (medians)": analysis.costs,
        "Servers without a guest (medians)": analysis.servers,
    },
    plots=plots.draw,
)
