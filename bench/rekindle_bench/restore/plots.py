"""Plots figure 4 of the HydraVM paper (HPL-2011-24): the steps of a restore, with the peer."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from . import analysis

PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#555555")
"""Palette of Okabe and Ito, and greys."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    steps_by_restore = analysis.steps(frame)
    return [draw_steps_of_restores(steps_by_restore, folder)] if steps_by_restore else []


def draw_steps_of_restores(steps_by_restore: Mapping[tuple[str, str], Mapping[str, float]], folder: Path) -> str:
    """Draws a bar for each kind of restore, which consists of its steps. `steps_by_restore`: see `analysis.steps`."""
    all_steps = steps_by_restore.values()
    names = list(dict.fromkeys(name for steps in all_steps for name in steps if name != analysis.REST))
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.45 * len(steps_by_restore)), layout="constrained")
    labels = [f"{what}: {how}" for what, how in steps_by_restore]
    ends_ms = [0.0] * len(labels)
    for index, name in enumerate([*names, analysis.REST]):
        lengths_ms = [steps.get(name, 0.0) for steps in all_steps]
        axes.barh(labels, lengths_ms, left=ends_ms, label=name, color=PALETTE[index % len(PALETTE)])
        ends_ms = [end_ms + length_ms for end_ms, length_ms in zip(ends_ms, lengths_ms, strict=True)]
    for label, whole_ms in zip(labels, ends_ms, strict=True):
        axes.text(whole_ms, label, f" {style.duration(whole_ms)}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms from the command to the guest's running (medians)")
    axes.grid(axis="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    style.title(figure, "A guest resumes (the paper's figure 4)")
    style.save(figure, folder / "restore-figure4.png")
    return "restore-figure4.png"
