"""Plots figures 5 to 8 of the RootHammer paper (TDSC 2010), as measured here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_bench.median_lines import draw_median_lines
from rekindle_lab import style
from rekindle_lab.guests import size

from .analysis import STAGES, reboots
from .rows import HOWS

STAGE_LABELS = {
    "services": "services stop",
    "suspend": "suspend",
    "down": "shutdown",
    "firmware": "firmware",
    "kernel": "kernel",
    "userspace": "user space",
    "resume": "resume, boot",
}
STAGE_COLOURS = {
    "services": "#DDDDDD",
    "suspend": "#CC79A7",
    "down": "#BBBBBB",
    "firmware": "#E69F00",
    "kernel": "#999999",
    "userspace": "#777777",
    "resume": "#56B4E9",
}
"""Palette of Okabe and Ito, and greys for the host's own stages."""
STAGE_BAR_Y, STAGE_BAR_HEIGHT, PANEL_TOP = 1.2, 0.12, 1.35
"""In figure 8: centre and height of the bar of stages, and end of the y axis, as multiples of the highest rate. So the
bar is above the curve, with space around it."""


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    by_reboot = reboots(frame[frame["where"] == "emulated"])
    sizes, counts = (by_reboot[by_reboot["case"] == case] for case in ("sizes", "counts"))
    names: list[str] = []
    if len(sizes):
        names.append(draw_suspend_resume_by_size(sizes, folder))
    if len(counts):
        names.append(draw_suspend_resume_by_count(counts, folder))
        names.append(draw_downtime_by_count(counts, folder))
    return names


def draw_throughput(records: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Draws the client's throughput during single reboots, if there are any; returns the names of the plots."""
    if not records:
        return []
    style.apply()
    return [draw_throughput_around_reboots(records, folder)]


def draw_suspend_resume_by_size(by_reboot: pd.DataFrame, folder: Path) -> str:
    """Draws figure 5: time to suspend and resume one guest, by its RAM."""
    ticks = {mib: size(mib) for mib in _values(by_reboot, "memory_mib")}
    figure = _plot_suspend_resume(by_reboot, "memory_mib", "RAM of the guest", ticks)
    style.title(figure, "Suspend and resume of all guests (the paper's figure 5)")
    return _save(figure, folder, "host-figure5.png")


def draw_suspend_resume_by_count(by_reboot: pd.DataFrame, folder: Path) -> str:
    """Draws figure 6: time to suspend and resume all guests, by their number."""
    ticks = {count: str(count) for count in _values(by_reboot, "vms")}
    figure = _plot_suspend_resume(by_reboot, "vms", "number of guests", ticks)
    style.title(figure, "Suspend and resume of all guests (the paper's figure 6)")
    return _save(figure, folder, "host-figure6.png")


def _plot_suspend_resume(by_reboot: pd.DataFrame, x: str, label: str, ticks: Mapping[int, str]) -> plt.Figure:
    """Plots the time to suspend, and to resume, over the column `x`. `ticks`: labels by value of `x`."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained", sharey=True)
    in_ms = by_reboot.assign(suspend_ms=by_reboot["before_s"] * 1e3, resume_ms=by_reboot["after_s"] * 1e3)
    columns = {"suspend_ms": "before: suspend", "resume_ms": "after: resume"}
    drawn_ms: list[float] = []
    for axes, (column, name) in zip(panels, columns.items(), strict=True):
        drawn_ms += draw_median_lines(axes, in_ms, HOWS, x, column)
        axes.set_title(name)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel(label)
    style.logarithmic_ms(panels[0], drawn_ms)
    panels[0].set_ylabel("time (median; bar to p95)")
    panels[0].legend()
    return figure


def draw_downtime_by_count(by_reboot: pd.DataFrame, folder: Path) -> str:
    """Draws figure 7: the longest downtime of a guest in a reboot, by the number of guests."""
    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    drawn_s = draw_median_lines(axes, by_reboot, HOWS, "vms", "downtime_s")
    axes.set_ylim(0, max(drawn_s, default=1.0) * 1.1)
    axes.set_xticks(_values(by_reboot, "vms"))
    axes.set_xlabel("number of guests")
    axes.set_ylabel("downtime of the last guest (s; median, bar to p95)")
    axes.legend()
    style.title(figure, "What a client sees (the paper's figure 7)")
    return _save(figure, folder, "host-figure7.png")


def draw_throughput_around_reboots(records: Sequence[dict[str, Any]], folder: Path) -> str:
    """Draws figure 8: a client's throughput around one reboot of each way, with the stages of the host's reboot."""
    height = 1.2 + 2.2 * len(records)
    figure, panels = plt.subplots(
        len(records), 1, figsize=(9, height), squeeze=False, layout="constrained", sharex=True
    )
    for axes, record in zip(panels.flat, records, strict=True):
        highest_rate = _draw_rate(axes, record)
        _draw_stages(axes, record["stages"], highest_rate)
        axes.set_ylim(0, PANEL_TOP * highest_rate)
        axes.set_ylabel("connections/s")
        axes.set_title(f"{record['how']}, {record['vms']} guests")
    panels[-1][0].set_xlabel("time since the command (s)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    style.title(figure, "A guest's service while its host is rebooted (the paper's figure 8)")
    return _save(figure, folder, "host-figure8.png")


def _draw_rate(axes: Axes, record: dict[str, Any]) -> float:
    """Draws connections per second over the time since the command. Returns the highest rate; 1 if all are 0."""
    probe = record["probe"]
    interval_s = probe["interval_ms"] / 1e3
    probe_start_s = (probe["started_unix_ns"] / 1e3 - record["command_us"]) / 1e6
    times_s = [probe_start_s + interval["start_ms"] / 1e3 for interval in probe["intervals"]]
    rates = [interval["answered"] / interval_s for interval in probe["intervals"]]
    axes.step(times_s, rates, where="post", color=style.COLOURS[record["how"]])
    return max(rates, default=1.0) or 1.0


def _draw_stages(axes: Axes, stages: Mapping[str, int], highest_rate: float) -> None:
    """Draws the stages of a reboot as one bar above the rates. `stages`: duration of NAME in us, by `NAME_us`."""
    begin_s = 0.0
    for name in STAGES:
        length_s = max(stages.get(f"{name}_us", 0), 0) / 1e6
        axes.barh(
            STAGE_BAR_Y * highest_rate,
            length_s,
            left=begin_s,
            height=STAGE_BAR_HEIGHT * highest_rate,
            color=STAGE_COLOURS[name],
            label=STAGE_LABELS[name],
        )
        begin_s += length_s


def _values(by_reboot: pd.DataFrame, column: str) -> list[int]:
    """Returns the different values of a column, in ascending order."""
    return sorted({int(value) for value in by_reboot[column]})


def _save(figure: plt.Figure, folder: Path, name: str) -> str:
    style.save(figure, folder / name)
    return name
