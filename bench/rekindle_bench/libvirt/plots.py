"""Plots what a guest is stopped for while its QEMU is replaced, a bar for each size and way."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style
from rekindle_lab.guests import size
from rekindle_lab.stats import median

from . import analysis

# Palette of Okabe and Ito, and greys.
PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#555555")


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plot if it has data, and returns its file name."""
    steps = {
        f"{case}: {how}, {size(mib)}": {name: median(values) for name, values in durations_ms.items()}
        for (case, mib, how), durations_ms in analysis.stopped_steps_ms(frame).items()
    }
    if not any(steps.values()):
        return []
    style.apply()
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.45 * len(steps)), layout="constrained")
    starts = [0.0] * len(steps)
    for index, name in enumerate(dict.fromkeys(name for medians in steps.values() for name in medians)):
        widths = [medians.get(name, 0.0) for medians in steps.values()]
        axes.barh(list(steps), widths, left=starts, label=name, color=PALETTE[index % len(PALETTE)])
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms in which the guest is stopped (medians of the steps)")
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle("A guest's QEMU is replaced", x=0.01, ha="left", fontweight="bold")
    style.save(figure, folder / "libvirt-stops.png")
    return ["libvirt-stops.png"]
