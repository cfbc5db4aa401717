"""Plots figures 5 to 8 of the RootHammer paper (TDSC 2010), with cpr-transfer as today's peer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_bench.median_lines import draw_median_lines
from rekindle_lab import style, throughput
from rekindle_lab.guests import size
from rekindle_lab.records import parse

from .analysis import tasks
from .rows import HOWS

TASKS = {
    "pre_ms": "before: suspend, save, shut down",
    "post_ms": "after: resume, load, boot",
    "stopped_ms": "guest stopped",
    "gap_ms": "service gap that a client sees",
}
"""Columns of `analysis.tasks`, one for each panel, with the panel's title."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    times = tasks(frame)
    by_ram = times[times["case"].isin(("ram", "sizes"))]
    by_count = times[times["case"] == "count"]
    names: list[str] = []
    if len(by_ram):
        names.append(draw_tasks_by_ram(by_ram, folder))
    if len(by_count):
        names.append(draw_tasks_by_count(by_count, folder))
        names.append(draw_gap_by_count(frame[frame["case"] == "count"], folder))
    return names


def draw_throughput(records: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Draws the client's throughput during single reboots, if there are any; returns the names of the plots."""
    if not records:
        return []
    style.apply()
    reboots = [parse(record) for record in records]
    path = folder / "vmm-breakdown.png"
    throughput.draw(reboots, path, title="nginx in debian while its VMM is replaced", same_time=False)
    return [path.name]


def draw_tasks_by_ram(times: pd.DataFrame, folder: Path) -> str:
    """Draws figure 5: the times of a reboot, by the guest's RAM."""
    ticks = {mib: size(mib) for mib in _values(times, "memory_mib")}
    figure, panels = _plot_tasks(times, "memory_mib", "guest RAM", ticks)
    for axes in panels:
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(list(ticks), list(ticks.values()))
    return _finish(figure, panels, "One micro guest, all RAM touched", folder, "vmm-ram.png")


def draw_tasks_by_count(times: pd.DataFrame, folder: Path) -> str:
    """Draws figure 6: the times of a reboot, by the number of guests that are rebooted in parallel."""
    ticks = {count: str(count) for count in _values(times, "vms")}
    figure, panels = _plot_tasks(times, "vms", "number of VMs", ticks)
    return _finish(figure, panels, "Small guests rebooted in parallel", folder, "vmm-count.png")


def draw_gap_by_count(rows: pd.DataFrame, folder: Path) -> str:
    """Draws figure 7: the service gap of a guest, by the number of guests that are rebooted in parallel."""
    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    gaps = rows.assign(gap_ms=rows["gap_us"] / 1e3)
    style.logarithmic_ms(axes, draw_median_lines(axes, gaps, HOWS, "vms", "gap_ms"))
    axes.set_xticks(_values(rows, "vms"))
    axes.set_xlabel("number of VMs rebooted in parallel")
    axes.set_ylabel("service gap of a VM (median; bar to p95)")
    return _finish(figure, [axes], "What a client sees", folder, "vmm-downtime.png")


def _plot_tasks(
    times: pd.DataFrame, x: str, xlabel: str, ticks: Mapping[int, str]
) -> tuple[plt.Figure, Sequence[Axes]]:
    """Plots the columns `TASKS` over the column `x`, one panel for each. `ticks`: labels by value of `x`."""
    figure, grid = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", sharey=True, sharex=True)
    panels = list(grid.flat)
    drawn_ms: list[float] = []
    for axes, (column, title) in zip(panels, TASKS.items(), strict=True):
        drawn_ms += draw_median_lines(axes, times, HOWS, x, column)
        axes.set_title(title)
        axes.set_xticks(list(ticks), list(ticks.values()))
    style.logarithmic_ms(panels[0], drawn_ms)
    for axes in grid[1]:
        axes.set_xlabel(xlabel)
    for axes in grid[:, 0]:
        axes.set_ylabel("time (median; bar to p95)")
    return figure, panels


def _values(frame: pd.DataFrame, column: str) -> list[int]:
    """Returns the different values of a column, in ascending order."""
    return sorted({int(value) for value in frame[column]})


def _finish(figure: plt.Figure, panels: Sequence[Axes], title: str, folder: Path, name: str) -> str:
    """Adds the legend and the title, and saves the figure. Returns the file's name."""
    style.shared_legend(figure, panels, order=HOWS, ncols=len(HOWS))
    style.title(figure, title)
    style.save(figure, folder / name)
    return name
