"""Plots figures 14 and 15 of the CacheMind paper: the share of runs in which the cache differed from the disk."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from . import analysis
from .kinds import KINDS
from .rows import OUTCOMES

COLOURS = {"crashed": "#D55E00", "died": "#CC79A7", "hung": "#E69F00", "stalled": "#56B4E9", "went on": "#009E73"}
"""Colours of outcomes, from the palette of Okabe and Ito."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    checked, unchecked = analysis.runs(frame, 1), analysis.runs(frame, 0)
    names = [kind.name for kind in KINDS if (frame["kind"] == kind.name).any()]
    return [draw_shares_of_wrong_runs(names, checked, unchecked, folder)] if len(checked) and len(unchecked) else []


def draw_shares_of_wrong_runs(names: list[str], checked: pd.DataFrame, unchecked: pd.DataFrame, folder: Path) -> str:
    """Draws the share of wrong runs of each type of faults: without the check as bars by outcome, with it as marks."""
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.3 * len(names)), layout="constrained")
    ends = [0.0] * len(names)
    for outcome in OUTCOMES:
        shares = [_percent_wrong(unchecked, name, outcome) for name in names]
        if any(shares):
            axes.barh(names, shares, left=ends, label=f"unchecked: {outcome}", color=COLOURS[outcome])
        ends = [end + share for end, share in zip(ends, shares, strict=True)]
    axes.plot([_percent_wrong(checked, name) for name in names], names, "k|", markersize=10, label="checked")
    axes.invert_yaxis()
    axes.set_xlim(0, 105)
    axes.set_xlabel("runs in which the guest read a block that is not on the disk (%)")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    style.title(figure, "Faults and the warm cache (the paper's figures 14 and 15)")
    style.save(figure, folder / "faults-figure15.png")
    return "faults-figure15.png"


def _percent_wrong(frame: pd.DataFrame, kind: str, outcome: str | None = None) -> float:
    """Returns the percentage of a type's runs with this outcome in which a block differed from the disk."""
    of_kind = frame[frame["kind"] == kind]
    wrong = of_kind[of_kind["wrong"] > 0]
    if outcome is not None:
        wrong = wrong[wrong["outcome"] == outcome]
    return 100.0 * len(wrong) / len(of_kind) if len(of_kind) else 0.0
