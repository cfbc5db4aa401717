"""Plots figures of the CacheMind paper: rates of file access (5 to 7, 11, 12) and of a web server (13)."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_bench.rows import matching
from rekindle_lab import style
from rekindle_lab.stats import median

from .analysis import rate, through_reboots, ways

COLOURS = {"warm-cache": "#0072B2", "cold": "#D55E00", "writeback": "#009E73", "none": "#999999"}
ACCESSES = (-2, -1, 1, 2)
"""Indices of the accesses (column `at`): two before a reboot and two after it."""
REBOOT_X = 1.5
"""Position of the reboot on an axis of accesses."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    names = [draw_file_access_through_reboots(frame, folder), draw_web_server_through_reboots(frame, folder)]
    return [name for name in names if name is not None]


def draw_file_access_through_reboots(frame: pd.DataFrame, folder: Path) -> str | None:
    """Draws the rate of each access before and after a reboot, by way; a panel for each kind of access."""
    rows = through_reboots(frame)
    kinds = list(dict.fromkeys(zip(rows["limit"], rows["on"], rows["what"], rows["block"], strict=True)))
    if not kinds:
        return None
    width = 2.6 * len(kinds) + 1
    figure, grid = plt.subplots(1, len(kinds), figsize=(width, 3.4), squeeze=False, layout="constrained", sharey=False)
    panels = list(grid.flat)
    for axes, (limit, on, what, block) in zip(panels, kinds, strict=True):
        _draw_accesses(axes, matching(rows, limit=limit, on=on, what=what, block=block))
        axes.set_title(f"{what}, {int(block)} bytes\n({on}, {limit})", fontsize=9)
    panels[0].set_ylabel("MB/s (medians)")
    style.shared_legend(figure, panels, ncols=4)
    style.title(figure, "A file through a reboot (the paper's figures 5 to 7, 11, 12)")
    style.save(figure, folder / "warm-cache-files.png")
    return "warm-cache-files.png"


def _draw_accesses(axes: Axes, rows: pd.DataFrame) -> None:
    """Draws a line through the median rates of each way."""
    for way in ways(rows):
        rates = {x: rate(matching(rows, how=way, at=index)) for x, index in enumerate(ACCESSES)}
        medians = {x: median(values) for x, values in rates.items() if values}
        axes.plot(list(medians), list(medians.values()), marker="o", color=COLOURS[way], label=way)
    axes.axvline(REBOOT_X, color="#888888", linestyle=":")
    axes.set_xticks(range(len(ACCESSES)), [f"{index:+d}" for index in ACCESSES])
    axes.set_ylim(0)


def draw_web_server_through_reboots(frame: pd.DataFrame, folder: Path) -> str | None:
    """Draws figure 13: the rate of a web server in each second before and after a reboot, by way."""
    rows = matching(frame, case="http", what="http")
    if not len(rows):
        return None
    figure, axes = plt.subplots(figsize=(8.5, 3.6), layout="constrained")
    for way in ways(rows):
        rates = matching(rows, how=way).groupby("second")["bytes"].median() / 1e6
        before, after = rates[rates.index < 0], rates[rates.index > 0]
        axes.plot(before.index, before.to_numpy(), color=COLOURS[way], label=way)
        axes.plot(after.index, after.to_numpy(), color=COLOURS[way])
    axes.axvline(0, color="#888888", linestyle=":")
    axes.set_ylim(0)
    axes.set_xlabel("s: before 0 until the reboot, after 0 since the guest is well again")
    axes.set_ylabel("MB/s (medians)")
    axes.legend()
    style.title(figure, "A web server through a reboot (the paper's figure 13)")
    style.save(figure, folder / "warm-cache-figure13.png")
    return "warm-cache-figure13.png"
