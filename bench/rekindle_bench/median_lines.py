"""Draws lines through medians, one for each way to reboot, with bars up to the 95th percentile."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from rekindle_lab import style
from rekindle_lab.stats import median, p95


def draw_median_lines(axes: Axes, frame: pd.DataFrame, ways: Sequence[str], x: str, y: str) -> list[float]:
    """Draws a line for each way (column `how`) over the columns `x` and `y`. Returns the medians and percentiles drawn.

    Omits values that are missing or 0, which a logarithmic axis cannot show.
    """
    drawn: list[float] = []
    for way in ways:
        of_way = frame[(frame["how"] == way) & (frame[y] > 0)]
        samples = {position: list(group[y]) for position, group in of_way.groupby(x, sort=True)}
        if not samples:
            continue
        medians = [median(values) for values in samples.values()]
        percentiles = [p95(values) for values in samples.values()]
        drawn += [*medians, *percentiles]
        above_median = [max(0.0, top - middle) for top, middle in zip(percentiles, medians, strict=True)]
        axes.errorbar(
            list(samples),
            medians,
            yerr=[[0.0] * len(samples), above_median],
            label=way,
            color=style.COLOURS[way],
            marker=style.MARKERS[way],
            linestyle=style.LINES[way],
            markersize=6,
            markerfacecolor=style.COLOURS[way] if way == "warm" else "none",
            capsize=3,
            elinewidth=1,
        )
    return drawn
