"""Plots one response: its values by level, and in the order of the runs."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from rekindle_lab import style
from rekindle_lab.analysis.anova import pooled_intervals
from rekindle_lab.analysis.judge import ResponseResult
from rekindle_lab.analysis.runs import Runs
from rekindle_lab.analysis.tables import heading

LEVEL_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
LEVEL_MARKERS = "osD^v<>"


def draw(runs: Runs, response: ResponseResult, path: Path) -> None:
    """Draws each run as a point: left by level with means and intervals, right in the order of the runs."""
    style.apply()
    figure, (by_level, by_run) = plt.subplots(
        1, 2, figsize=(10, 3.6), width_ratios=(2, 3), sharey=True, layout="constrained"
    )
    levels = list(response.groups)
    jitter = np.random.default_rng(1)  # moves points of one level apart; a fixed seed, so that one file gives one plot
    groups, anova = list(response.groups.values()), response.anova
    intervals = pooled_intervals(groups, anova.error) if anova else [None] * len(levels)
    for index, (level, interval) in enumerate(zip(levels, intervals, strict=True)):
        colour, marker = LEVEL_COLOURS[index % len(LEVEL_COLOURS)], LEVEL_MARKERS[index % len(LEVEL_MARKERS)]
        positions = [position for position, run in enumerate(runs.done, start=1) if run.level == level]
        values = [run.responses[response.name] for run in runs.done if run.level == level]
        columns = index + jitter.uniform(-0.15, 0.15, len(values))
        by_level.scatter(columns, values, s=16, color=colour, marker=marker, alpha=0.6)
        mean = groups[index].mean
        error = None if interval is None else [[mean - interval.low], [interval.high - mean]]
        by_level.errorbar([index + 0.28], [mean], error, fmt=marker, color=colour, capsize=4)
        by_run.scatter(positions, values, s=16, color=colour, marker=marker, label=level)
    by_level.set_xticks(range(len(levels)), levels)
    by_level.set_xlim(-0.5, len(levels) - 0.4)
    by_level.set_ylabel(heading(response.name))
    by_level.set_title("by level, mean with 95 % interval" if anova else "by level, mean")
    by_run.set_title("in the order of the runs")
    by_run.set_xlabel("run")
    by_run.xaxis.set_major_locator(MaxNLocator(integer=True))
    by_run.legend(fontsize=8, loc="best")
    style.save(figure, path)
