"""Plots figures 2 and 3 of the HydraVM paper (HPL-2011-24), and guest-stopped times of Rekindle and peers."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_lab import style
from rekindle_lab.guests import size
from rekindle_lab.peers.snapshot import WAYS
from rekindle_lab.stats import median, p95

from . import analysis
from .rows import DEFAULT, POLICIES

# Palette of Okabe and Ito.
COLOURS = {
    DEFAULT: "#0072B2",
    "cow": "#009E73",
    "basic": "#D55E00",
    "background-snapshot": "#E69F00",
    "mapped-ram": "#CC79A7",
    "full": "#777777",
}


HATCHES = {"disk": "", "slow": "//", "s3": "..", "tls": "xx"}
"""Hatch of a bar by the kind of store. `tls`: a server of Rekindle, which earlier rows have."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    plots = (draw_stopped_time_by_size, draw_pause_by_interval, draw_overhead_and_protection)
    names = [plot(frame, folder) for plot in plots]
    return [name for name in names if name is not None]


def _draw_bar_groups(axes: Axes, groups: list[str], series: dict[str, list[float | None]]) -> None:
    """Draws bars in groups, one bar of each series in a group, with their values on top."""
    for index, (name, values) in enumerate(series.items()):
        positions, width = _positions(len(groups), index, len(series))
        heights = [value if value is not None else 0.0 for value in values]
        bars = axes.bar(positions, heights, width, label=name, color=COLOURS.get(name, style.FALLBACK))
        labels = [f"{value:.3g}" if value is not None else "" for value in values]
        axes.bar_label(bars, labels, padding=2, fontsize=7)
    axes.set_xticks(range(len(groups)), groups)


def _positions(groups: int, index: int, series: int) -> tuple[list[float], float]:
    """Returns where the bars of a series stand, one in each group, and their width."""
    width = 0.8 / max(1, series)
    return [group + (index - (series - 1) / 2) * width for group in range(groups)], width


def draw_stopped_time_by_size(frame: pd.DataFrame, folder: Path) -> str | None:
    """Draws the guest-stopped time of a checkpoint by each policy, and of a save by each peer, by the guest's RAM."""
    sizes = sorted(int(mib) for mib in frame[frame["case"] == "pause"]["memory_mib"].unique())
    if not sizes:
        return None
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    drawn: list[float] = []
    series: dict[str, list[float | None]] = {}
    for how in (*POLICIES, *WAYS):
        samples = [analysis.stopped_ms(frame, "pause", how, memory_mib=mib) for mib in sizes]
        series[how] = [median(sample) if sample else None for sample in samples]
        drawn += [p95(sample) for sample in samples if sample] + [value for value in series[how] if value is not None]
    _draw_bar_groups(axes, [size(mib) for mib in sizes], series)
    style.logarithmic_ms(axes, drawn)
    axes.set_ylabel("guest-stopped time (median)")
    axes.set_xlabel("guest RAM")
    figure.legend(loc="outside lower center", ncols=3)
    style.title(figure, "A checkpoint, or a save, of a guest that compiles")
    style.save(figure, folder / "protect-pause.png")
    return "protect-pause.png"


def draw_pause_by_interval(frame: pd.DataFrame, folder: Path) -> str | None:
    """Draws figure 2: the mean pause of a checkpoint by each policy, by the configured interval."""
    means_ms = {
        (line["policy"], line["every s"]): line["mean ms"]
        for line in analysis.pauses_by_interval(frame)
        if line["store"] == "disk"
    }
    if not means_ms:
        return None
    intervals_s = sorted({every_s for _, every_s in means_ms}, reverse=True)
    series = {how: [means_ms.get((how, every_s)) for every_s in intervals_s] for how in POLICIES}
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    _draw_bar_groups(axes, [f"{every_s:g} s" for every_s in intervals_s], series)
    style.logarithmic_ms(axes, [value for values in series.values() for value in values if value])
    axes.set_ylabel("mean pause")
    axes.set_xlabel("configured interval")
    figure.legend(loc="outside lower center", ncols=3)
    style.title(figure, "Pause by policy and interval (the paper's figure 2)")
    style.save(figure, folder / "protect-figure2.png")
    return "protect-figure2.png"


def draw_overhead_and_protection(frame: pd.DataFrame, folder: Path) -> str | None:
    """Draws figure 3: overhead and level of protection, by interval, policy and store; a column for each workload."""
    lines = analysis.overheads(frame)
    if not lines:
        return None
    workloads = sorted({str(line["workload"]) for line in lines})
    figure, grid = plt.subplots(
        2, len(workloads), figsize=(5.5 * len(workloads), 6.5), layout="constrained", squeeze=False
    )
    for column, workload in enumerate(workloads):
        of_workload = [line for line in lines if line["workload"] == workload]
        for axes, key, name in (
            (grid[0][column], "overhead %", "overhead (%)"),
            (grid[1][column], "level %", "level of protection (%)"),
        ):
            _draw_cells(axes, of_workload, key)
            axes.set_ylabel(name)
            axes.axhline(0, color="#000000", linewidth=0.8)
        grid[0][column].set_title(workload)
        grid[1][column].set_xlabel("configured interval")
    style.shared_legend(figure, grid.flat, ncols=5)
    style.title(figure, "Overhead and level of protection (the paper's figure 3)")
    style.save(figure, folder / "protect-figure3.png")
    return "protect-figure3.png"


def _draw_cells(axes: Axes, lines: list[dict[str, Any]], key: str) -> None:
    """Draws the column `key` of `analysis.overheads`: a group for each interval, a bar for each policy and store."""
    # If a cell was measured more than once, its first line counts.
    values = {(line["policy"], line["store"], line["every s"]): line[key] for line in reversed(lines)}
    intervals_s = sorted({line["every s"] for line in lines}, reverse=True)
    cells = list(dict.fromkeys((line["policy"], line["store"]) for line in lines))
    for index, (policy, store) in enumerate(cells):
        heights = [values.get((policy, store, every_s), 0.0) for every_s in intervals_s]
        positions, width = _positions(len(intervals_s), index, len(cells))
        label = f"{policy}, {store}"
        axes.bar(positions, heights, width, label=label, color=COLOURS[policy], hatch=HATCHES[store])
    axes.set_xticks(range(len(intervals_s)), [f"{every_s:g} s" for every_s in intervals_s])
