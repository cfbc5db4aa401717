"""Computes and draws figures 9, 10 and 16 of RootHammer, with the paper's parameters or with measured ones.

`figure_9`, `figure_10` and `figure_16` compute the curves: a table with the quantity of the x axis in its first column
and a column for each technique. `draw` draws one or several of them as panels of one picture.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rekindle_lab import style
from rekindle_lab.models import throughput
from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import DAY_S, Parameters, Timers

POINTS_PER_CURVE = 800
COLOURS = {**style.COLOURS, "migration": "#CC79A7", "live": "#56B4E9", "live-adaptive": "#777777"}
LINES = {**style.LINES, "migration": (0, (5, 1)), "live": (0, (3, 1, 1, 1)), "live-adaptive": (0, (1, 2))}


def figure_9(parameters: Parameters, longest_d: float = 28) -> pd.DataFrame:
    """Computes availability (share, to 1) by the OS's interval in days, at the given interval of the VMM."""
    days = np.geomspace(0.25, longest_d, POINTS_PER_CURVE)
    vmm_s = parameters.timers.vmm_interval_s
    return _curves(parameters, "os_interval_d", days, lambda day: Timers(vmm_s, day * DAY_S))


def figure_10(parameters: Parameters, longest_d: float = 28) -> pd.DataFrame:
    """Computes availability (share, to 1) by the VMM's interval in days, at the given interval of the OS."""
    renewal_d = max(technique.vmm_downtime_s for technique in parameters.techniques.values()) / DAY_S
    days = np.geomspace(max(0.25, renewal_d * 1.01), max(longest_d, renewal_d * 100), POINTS_PER_CURVE)
    os_s = parameters.timers.os_interval_s
    return _curves(parameters, "vmm_interval_d", days, lambda day: Timers(day * DAY_S, os_s))


def _curves(
    parameters: Parameters, column: str, days: Sequence[float], timers: Callable[[float], Timers]
) -> pd.DataFrame:
    """Computes the availability of each technique for each of `days`; `timers` returns the timers of a day."""
    table = {column: list(days)}
    for name, technique in parameters.techniques.items():
        table[f"{name}_availability"] = [availability(technique, parameters.os, timers(day)) for day in days]
    return pd.DataFrame(table)


def figure_16(parameters: Parameters, most_hosts: float = 1e5) -> pd.DataFrame:
    """Computes the performance index (share, to 1) by the number of hosts of a cluster.

    The first row is the smallest cluster in which every technique is possible.
    """
    fewest = throughput.fewest_hosts(parameters.techniques.values())
    hosts = np.unique(np.geomspace(fewest, max(most_hosts, fewest * 10), POINTS_PER_CURVE).round())
    table = {"hosts": list(hosts)}
    for name, technique in parameters.techniques.items():
        table[f"{name}_index"] = [
            throughput.index(technique, parameters.os, parameters.timers, count) for count in hosts
        ]
    return pd.DataFrame(table)


class Panel(NamedTuple):
    """A panel of a picture: its title, and the table of its curves."""

    title: str
    curves: pd.DataFrame


def draw(panels: Sequence[Panel], path: Path, label: str) -> None:
    """Draws the panels side by side. The y axis, called `label`, is the difference to 1, logarithmic."""
    style.apply()
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(6.2 * len(panels), 4.2), squeeze=False, layout="constrained"
    )
    for axes, panel in zip(all_axes[0], panels, strict=True):
        curves = panel.curves
        x, *y_columns = curves.columns
        for column in y_columns:
            technique = column.rsplit("_", 1)[0]
            difference_to_1 = 1 - curves[column].where(curves[column] < 1)
            colour, line = COLOURS.get(technique, style.FALLBACK), LINES.get(technique, "-")
            axes.plot(curves[x], difference_to_1, label=technique, color=colour, ls=line)
        _scale_towards_1(axes, 1 - curves[y_columns].to_numpy())
        if x == "hosts":
            axes.set_xscale("log")
        axes.set_xlabel(x.replace("_d", " (days)").replace("_", " "))
        axes.set_ylabel(label)
        axes.set_title(panel.title)
        axes.legend(loc="lower right", fontsize=8)
    style.save(figure, path)


def _scale_towards_1(axes: Axes, differences_to_1: np.ndarray) -> None:
    """Scales the axis so that 0.9, 0.99, 0.999, ... have equal distances, with 1 far above them."""
    axes.set_yscale("log")
    positive = differences_to_1[differences_to_1 > 0]
    low, high = 1e-6, 1e-3  # without curves
    if positive.size:
        low, high = float(positive.min()) / 1.5, min(1.0, float(positive.max()) * 1.5)
    axes.set_ylim(high, low)
    steps = (1, 2, 5) if high < 100 * low else (1,)
    ticks = [step * 10.0**power for power in range(-12, 1) for step in steps if low <= step * 10.0**power <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{1 - value:.12f}".rstrip("0")))
