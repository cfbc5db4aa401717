"""Plots one response: its values by level, and in the order of the runs."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from rekindle_lab import style
from rekindle_lab.analysis.anova import pooled_intervals
from rekindle_lab.analysis.judge import Response
from rekindle_lab.analysis.runs import Runs
from rekindle_lab.analysis.tables import heading

CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
MARKERS = "osD^v<>"


def draw(runs: Runs, response: Response, path: Path) -> None:
    """Draws each run as a point: left by level with means and intervals, right in the order of the runs."""
    style.apply()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=(2, 3), sharey=True, layout="constrained"
    )
    levels = list(response.groups)
    spread = np.random.default_rng(1)
    table = response.anova
    intervals = pooled_intervals(list(response.groups.values()), table.error) if table else [None] * len(levels)
    for index, (level, interval) in enumerate(zip(levels, intervals, strict=True)):
        colour, marker = CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]
        mine = [(number, run) for number, run in enumerate(runs.done, start=1) if run.level == level]
        values = [run.responses[response.name] for _, run in mine]
        left.scatter(
            index + spread.uniform(-0.15, 0.15, len(values)), values, s=16, color=colour, marker=marker, alpha=0.6
        )
        mean = response.groups[level].mean
        error = None if interval is None else [[mean - interval[0]], [interval[1] - mean]]
        left.errorbar([index + 0.28], [mean], error, fmt=marker, color=colour, capsize=4)
        right.scatter([number for number, _ in mine], values, s=16, color=colour, marker=marker, label=level)
    left.set_xticks(range(len(levels)), levels)
    left.set_xlim(-0.5, len(levels) - 0.4)
    left.set_ylabel(heading(response.name))
    left.set_title("by level, mean with 95 % interval" if response.anova else "by level, mean")
    right.set_title("in the order of the runs")
    right.set_xlabel("run")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend(fontsize=8, loc="best")
    style.save(figure, path)
