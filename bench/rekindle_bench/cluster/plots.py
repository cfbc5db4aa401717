"""Plots the parts of each fail-over as a bar."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from . import analysis

COLOURS = ("#999999", "#0072B2", "#009E73")


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    parts = analysis.parts(frame).dropna().reset_index(drop=True)
    if parts.empty:
        return []
    style.apply()
    figure, axes = plt.subplots(figsize=(8.5, 1.4 + 0.22 * len(parts)), layout="constrained")
    starts = pd.Series(0.0, index=parts.index)
    for name, colour in zip(parts.columns, COLOURS, strict=True):
        axes.barh(parts.index + 1, parts[name], left=starts, label=name, color=colour)
        starts = starts + parts[name]
    axes.invert_yaxis()
    axes.set_xlabel("s from the node's death to the first answer of its guest elsewhere")
    axes.set_ylabel("fail-over")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle("A node dies", x=0.01, ha="left", fontweight="bold")
    style.save(figure, folder / "cluster-failover.png")
    return ["cluster-failover.png"]
