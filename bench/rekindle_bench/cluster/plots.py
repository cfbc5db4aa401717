"""Plots each fail-over as a bar: from the node's death to the first answer of its guest elsewhere."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from . import analysis

COLOURS = ("#999999", "#0072B2", "#009E73")
"""Colours of the parts of a fail-over, in the order of `analysis.parts`."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    parts = analysis.parts(frame).dropna().reset_index(drop=True)
    return [] if parts.empty else [draw_parts_of_fail_overs(parts, folder)]


def draw_parts_of_fail_overs(parts: pd.DataFrame, folder: Path) -> str:
    """Draws a bar for each fail-over, divided into its parts: a column of `parts` for each, in s."""
    figure, axes = plt.subplots(figsize=(8.5, 1.4 + 0.22 * len(parts)), layout="constrained")
    ends_of_previous_part = pd.Series(0.0, index=parts.index)
    for name, colour in zip(parts.columns, COLOURS, strict=True):
        axes.barh(parts.index + 1, parts[name], left=ends_of_previous_part, label=name, color=colour)
        ends_of_previous_part = ends_of_previous_part + parts[name]
    axes.invert_yaxis()
    axes.set_xlabel("s from the node's death to the first answer of its guest elsewhere")
    axes.set_ylabel("fail-over")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    style.title(figure, "A node dies")
    style.save(figure, folder / "cluster-failover.png")
    return "cluster-failover.png"
