"""Plots the paper's figures 14 and 15: the share of runs in which the cache differed from the disk."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from . import analysis
from .kinds import KINDS
from .rows import OUTCOMES

# Palette of Okabe and Ito.
COLOURS = {"crashed": "#D55E00", "died": "#CC79A7", "hung": "#E69F00", "stalled": "#56B4E9", "went on": "#009E73"}


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    checked, unchecked = analysis.runs(frame, 1), analysis.runs(frame, 0)
    names = [kind.name for kind in KINDS if (frame["kind"] == kind.name).any()]
    if not len(unchecked) or not len(checked):
        return []
    style.apply()
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.3 * len(names)), layout="constrained")
    starts = [0.0] * len(names)
    for outcome in OUTCOMES:
        shares = [_share(unchecked, name, outcome) for name in names]
        if any(shares):
            axes.barh(names, shares, left=starts, label=f"unchecked: {outcome}", color=COLOURS[outcome])
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    axes.plot([_share(checked, name, None) for name in names], names, "k|", markersize=10, label="checked")
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("runs in which the guest read a block that is not on the disk (%)")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    style.title(figure, "Faults and the warm cache (the paper's figures 14 and 15)")
    style.save(figure, folder / "faults-figure15.png")
    return ["faults-figure15.png"]


def _share(frame: pd.DataFrame, kind: str, outcome: str | None) -> float:
    of_kind = frame[frame["kind"] == kind]
    wrong = of_kind[of_kind["wrong"] > 0]
    if outcome is not None:
        wrong = wrong[wrong["outcome"] == outcome]
    return 100.0 * len(wrong) / len(of_kind) if len(of_kind) else 0.0
