"""Plots the paper's figure 4: the parts of a restore, with the peer."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from . import analysis

# Palette of Okabe and Ito, and greys.
PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#555555")


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    parts = analysis.steps(frame)
    if not parts:
        return []
    style.apply()
    names = list(dict.fromkeys(name for medians in parts.values() for name in medians if name != "the rest"))
    names.append("the rest")
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.45 * len(parts)), layout="constrained")
    labels = [f"{what}: {how}" for what, how in parts]
    starts = [0.0] * len(parts)
    for index, name in enumerate(names):
        widths = [medians.get(name, 0.0) for medians in parts.values()]
        axes.barh(labels, widths, left=starts, label=name, color=PALETTE[index % len(PALETTE)])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for label, whole_ms in zip(labels, starts, strict=True):
        axes.text(whole_ms, label, f" {style.duration(whole_ms)}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the command to the guest's running (medians)")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    style.title(figure, "A guest resumes (the paper's figure 4)")
    style.save(figure, folder / "restore-figure4.png")
    return ["restore-figure4.png"]
