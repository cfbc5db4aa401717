"""Plots the paper's figures 5, 6, 7 and 8, with cpr-transfer as today's peer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_lab import style, throughput
from rekindle_lab.guests import size
from rekindle_lab.records import parse
from rekindle_lab.stats import median, p95

from .analysis import tasks
from .rows import HOWS


def lines(axes: Axes, frame: pd.DataFrame, x: str, column: str) -> list[float]:
    """Draws a line through the medians of each way, with a bar up to the 95th percentile. Returns the values drawn."""
    drawn: list[float] = []
    for how in HOWS:
        rows = frame[(frame["how"] == how) & frame[column].notna() & (frame[column] > 0)]
        points = [(key, list(group[column])) for key, group in rows.groupby(x, sort=True)]
        if not points:
            continue
        positions = [key for key, _ in points]
        medians = [median(values) for _, values in points]
        tops = [p95(values) for _, values in points]
        drawn += [*medians, *tops]
        bar_heights = [max(0.0, top - middle) for top, middle in zip(tops, medians, strict=True)]
        axes.errorbar(
            positions,
            medians,
            yerr=[[0.0] * len(bar_heights), bar_heights],
            label=how,
            color=style.COLOURS[how],
            marker=style.MARKERS[how],
            linestyle=style.LINES[how],
            markersize=6,
            markerfacecolor=style.COLOURS[how] if how == "warm" else "none",
            capsize=3,
            elinewidth=1,
        )
    return drawn


def _finish(figure: plt.Figure, panels: Sequence[Axes], title: str, path: Path) -> None:
    style.shared_legend(figure, panels, order=HOWS, ncols=len(HOWS))
    style.title(figure, title)
    style.save(figure, path)


def _tasks(frame: pd.DataFrame, x: str, xlabel: str, ticks: dict[int, str], title: str, path: Path) -> None:
    """Plots the times of `analysis.tasks` over the column `x`, one panel for each. `ticks`: labels by value of `x`."""
    figure, grid = plt.subplots(2, 2, figsize=(9, 7), layout="constrained", sharey=True, sharex=True)
    panels = list(grid.flat)
    columns = (
        ("pre_ms", "before: suspend, save, shut down"),
        ("post_ms", "after: resume, load, boot"),
        ("stopped_ms", "guest stopped"),
        ("gap_ms", "service gap that a client sees"),
    )
    drawn: list[float] = []
    for axes, (column, name) in zip(panels, columns, strict=True):
        drawn += lines(axes, frame, x, column)
        if x == "memory_mib":
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_title(name)
        axes.set_xticks(list(ticks), list(ticks.values()))
    style.logarithmic_ms(panels[0], drawn)
    for axes in grid[1]:
        axes.set_xlabel(xlabel)
    for axes in grid[:, 0]:
        axes.set_ylabel("time (median; bar to p95)")
    _finish(figure, panels, title, path)


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    names: list[str] = []
    times = tasks(frame)
    ram = times[times["case"].isin(("ram", "sizes"))]
    if len(ram):
        ticks = {int(mib): size(int(mib)) for mib in sorted(ram["memory_mib"].unique())}
        title = "One micro guest, all RAM touched"
        _tasks(ram, "memory_mib", "guest RAM", ticks, title, folder / "vmm-ram.png")
        names.append("vmm-ram.png")
    count = times[times["case"] == "count"]
    if len(count):
        ticks = {int(n): str(int(n)) for n in sorted(count["vms"].unique())}
        title = "Small guests rebooted in parallel"
        _tasks(count, "vms", "number of VMs", ticks, title, folder / "vmm-count.png")
        names.append("vmm-count.png")
        figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
        gaps = frame[frame["case"] == "count"].assign(gap_ms=frame["gap_us"] / 1e3)
        style.logarithmic_ms(axes, lines(axes, gaps, "vms", "gap_ms"))
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel("number of VMs rebooted in parallel")
        axes.set_ylabel("service gap of a VM (median; bar to p95)")
        _finish(figure, [axes], "What a client sees", folder / "vmm-downtime.png")
        names.append("vmm-downtime.png")
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
