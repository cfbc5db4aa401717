"""Plots downtime by stages of the boot, a bar for each guest and way."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_lab import style

from .analysis import JUMP, REST, STAGES, stages_of
from .rows import WAYS

ALL_STAGES = (JUMP, *STAGES, REST)
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
    reboots = frame[frame["case"] == "reboot"]
    return [draw_downtime_by_stages(reboots, folder)] if len(reboots) else []


def draw_downtime_by_stages(reboots: pd.DataFrame, folder: Path) -> str:
    """Draws a panel for each guest, with a bar for each way that consists of the stages of the downtime."""
    guests = list(dict.fromkeys(reboots["guest"]))
    height = 0.8 + 1.9 * len(guests)
    figure, grid = plt.subplots(len(guests), 1, figsize=(8.5, height), squeeze=False, layout="constrained")
    panels = list(grid.flat)
    for axes, guest in zip(panels, guests, strict=True):
        _draw_guest(axes, reboots[reboots["guest"] == guest])
        axes.set_title(guest)
    panels[-1].set_xlabel("s without an answer (medians of the stages)")
    style.shared_legend(figure, panels, order=ALL_STAGES, ncols=4)
    style.title(figure, "Rebooting a guest's system, by stages")
    style.save(figure, folder / "os-stages.png")
    return "os-stages.png"


def _draw_guest(axes: Axes, reboots: pd.DataFrame) -> None:
    """Draws a bar for each way in which a guest was rebooted."""
    ways = [how for how in WAYS if how in set(reboots["how"])]
    for bar, how in enumerate(ways):
        medians_s = stages_of(reboots[reboots["how"] == how], how)
        begin_s = 0.0
        for stage in ALL_STAGES:
            length_s = medians_s.get(stage)
            if length_s is not None:
                axes.barh(bar, length_s, left=begin_s, color=COLOURS[stage], label=stage, height=0.7)
                begin_s += length_s
    axes.set_yticks(range(len(ways)), ways)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
