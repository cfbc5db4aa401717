"""Plots downtime by stages of the boot, a bar for each guest and way."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from rekindle_lab import style

from .analysis import JUMP, REST, STAGES, stages_of
from .rows import WAYS

COLOURS = {
    JUMP: "#999999",
    "shut down": "#BBBBBB",
    "new QEMU": "#F0E442",
    "firmware": "#D55E00",
    "loader": "#E69F00",
    "kernel": "#0072B2",
    "user space": "#56B4E9",
    REST: "#009E73",
}


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    rows = frame[frame["case"] == "reboot"]
    guests = list(dict.fromkeys(rows["guest"]))
    if not guests:
        return []
    figure, all_axes = plt.subplots(
        len(guests), 1, figsize=(8.5, 0.8 + 1.9 * len(guests)), squeeze=False, layout="constrained"
    )
    for axes, guest in zip(all_axes[:, 0], guests, strict=True):
        of_guest = rows[rows["guest"] == guest]
        ways = [how for how in WAYS if how in set(of_guest["how"])]
        for position, how in enumerate(ways):
            stage_start = 0.0
            medians_s = stages_of(of_guest[of_guest["how"] == how], how)
            for name in (JUMP, *STAGES, REST):
                if name in medians_s:
                    axes.barh(position, medians_s[name], left=stage_start, color=COLOURS[name], label=name, height=0.7)
                    stage_start += medians_s[name]
        axes.set_yticks(range(len(ways)), ways)
        axes.invert_yaxis()
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_title(guest)
    all_axes[-1, 0].set_xlabel("s without an answer (medians of the stages)")
    style.shared_legend(figure, all_axes.flat, order=(JUMP, *STAGES, REST), ncols=4)
    style.title(figure, "Rebooting a guest's system, by stages")
    style.save(figure, folder / "os-stages.png")
    return ["os-stages.png"]
