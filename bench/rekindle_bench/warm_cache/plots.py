"""Plots the paper's figures 5 and 13: reads of a file, and a web server's rate, before and after a reboot."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_bench.rows import matching
from rekindle_lab import style
from rekindle_lab.stats import median

from .analysis import rate, through_reboots, ways

COLOURS = {"warm-cache": "#0072B2", "cold": "#D55E00", "writeback": "#009E73", "none": "#999999"}
AT = (-2, -1, 1, 2)
"""Indices of the accesses: before a reboot and after it."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    return [name for name in (_accesses(frame, folder), _web(frame, folder)) if name]


def _accesses(frame: pd.DataFrame, folder: Path) -> str | None:
    rows = through_reboots(frame)
    kinds = list(dict.fromkeys(zip(rows["limit"], rows["on"], rows["what"], rows["block"], strict=True)))
    if not kinds:
        return None
    figure, all_axes = plt.subplots(
        1, len(kinds), figsize=(2.6 * len(kinds) + 1, 3.4), squeeze=False, layout="constrained", sharey=False
    )
    for axes, (limit, on, what, block) in zip(all_axes[0], kinds, strict=True):
        of_kind = matching(rows, limit=limit, on=on, what=what, block=block)
        for way in ways(of_kind):
            rates = {position: rate(matching(of_kind, how=way, at=at)) for position, at in enumerate(AT)}
            medians = {position: median(values) for position, values in rates.items() if values}
            axes.plot(list(medians), list(medians.values()), marker="o", color=COLOURS[way], label=way)
        axes.axvline(1.5, color="#888888", linestyle=":")
        axes.set_xticks(range(len(AT)), [f"{at:+d}" for at in AT])
        axes.set_ylim(0)
        axes.set_title(f"{what}, {int(block)} bytes\n({on}, {limit})", fontsize=9)
    all_axes[0][0].set_ylabel("MB/s (medians)")
    style.shared_legend(figure, all_axes.flat, ncols=4)
    style.title(figure, "A file through a reboot (the paper's figures 5 to 7, 11, 12)")
    style.save(figure, folder / "warm-cache-files.png")
    return "warm-cache-files.png"


def _web(frame: pd.DataFrame, folder: Path) -> str | None:
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
