"""Plots the paper's figures 5 to 8."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from rekindle_lab import style
from rekindle_lab.guests import size
from rekindle_lab.stats import median, p95

from .analysis import STAGES, reboots
from .rows import HOWS

NAMES = {
    "services": "services stop",
    "suspend": "suspend",
    "down": "shutdown",
    "firmware": "firmware",
    "kernel": "kernel",
    "userspace": "user space",
    "resume": "resume, boot",
}
# Palette of Okabe and Ito, and greys for the host's own parts.
COLOURS = {
    "services": "#DDDDDD",
    "suspend": "#CC79A7",
    "down": "#BBBBBB",
    "firmware": "#E69F00",
    "kernel": "#999999",
    "userspace": "#777777",
    "resume": "#56B4E9",
}


def draw(frame: pd.DataFrame, folder: Path) -> list[str]:
    """Draws the plots that have data, and returns their file names."""
    style.apply()
    by_reboot = reboots(frame[frame["where"] == "emulated"])
    names: list[str] = []
    for case, x, label, number in (
        ("sizes", "memory_mib", "RAM of the guest", 5),
        ("counts", "vms", "number of guests", 6),
    ):
        of_case = by_reboot[by_reboot["case"] == case]
        if len(of_case):
            path = folder / f"host-figure{number}.png"
            values = sorted(int(value) for value in of_case[x].unique())
            ticks = {value: size(value) if x == "memory_mib" else str(value) for value in values}
            tasks(of_case, x, label, ticks, path, f"Suspend and resume of all guests (the paper's figure {number})")
            names.append(path.name)
    counts = by_reboot[by_reboot["case"] == "counts"]
    if len(counts):
        figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
        values = lines(axes, counts, "vms", "downtime_s")
        axes.set_ylim(0, max(values, default=1.0) * 1.1)
        axes.set_xticks(sorted({int(n) for n in counts["vms"]}))
        axes.set_xlabel("number of guests")
        axes.set_ylabel("downtime of the last guest (s; median, bar to p95)")
        axes.legend()
        style.title(figure, "What a client sees (the paper's figure 7)")
        style.save(figure, folder / "host-figure7.png")
        names.append("host-figure7.png")
    return names


def draw_throughput(records: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Draws the client's throughput during single reboots, if there are any; returns the names of the plots."""
    if not records:
        return []
    style.apply()
    path = folder / "host-figure8.png"
    breakdown(records, path)
    return [path.name]


def lines(axes: Axes, frame: pd.DataFrame, x: str, column: str) -> list[float]:
    """Draws a line through the medians of each way, with a bar up to the 95th percentile. Returns the values drawn."""
    drawn: list[float] = []
    for how in HOWS:
        rows = frame[(frame["how"] == how) & frame[column].notna()]
        samples = {float(str(position)): list(group[column]) for position, group in rows.groupby(x, sort=True)}
        if not samples:
            continue
        medians = [median(values) for values in samples.values()]
        tops = [p95(values) for values in samples.values()]
        drawn += tops
        axes.errorbar(
            list(samples),
            medians,
            yerr=[[0.0] * len(samples), [max(0.0, top - middle) for top, middle in zip(tops, medians, strict=True)]],
            label=how,
            color=style.COLOURS[how],
            marker=style.MARKERS[how],
            linestyle=style.LINES[how],
            capsize=3,
        )
    return drawn


def tasks(frame: pd.DataFrame, x: str, label: str, ticks: dict[int, str], path: Path, title: str) -> None:
    """Plots the time that work on guests takes before and after the host's own reboot."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained", sharey=True)
    drawn: list[float] = []
    in_ms = frame.assign(before_ms=frame["before_s"] * 1e3, after_ms=frame["after_s"] * 1e3)
    for axes, column, name in zip(panels, ("before_ms", "after_ms"), ("before: suspend", "after: resume"), strict=True):
        drawn += lines(axes, in_ms, x, column)
        axes.set_title(name)
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel(label)
    style.logarithmic_ms(panels[0], [value for value in drawn if value > 0])
    panels[0].set_ylabel("time (median; bar to p95)")
    panels[0].legend()
    style.title(figure, title)
    style.save(figure, path)


def breakdown(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots throughput over time around a reboot of each way, with the steps of the host."""
    figure, panels = plt.subplots(
        len(records), 1, figsize=(9, 1.2 + 2.2 * len(records)), squeeze=False, layout="constrained", sharex=True
    )
    for axes, record in zip(panels.flat, records, strict=True):
        probe, zero = record["probe"], record["command_us"]
        width = probe["interval_ms"] / 1e3
        probe_start = (probe["started_unix_ns"] / 1e3 - zero) / 1e6
        times = [probe_start + interval["start_ms"] / 1e3 for interval in probe["intervals"]]
        rate = [interval["answered"] / width for interval in probe["intervals"]]
        axes.step(times, rate, where="post", color=style.COLOURS[record["how"]])
        top = max(rate, default=1.0) or 1.0
        stage_start = 0.0
        for name in STAGES:
            stage_s = max(record["stages"].get(f"{name}_us", 0), 0) / 1e6
            axes.barh(1.2 * top, stage_s, left=stage_start, height=0.12 * top, color=COLOURS[name], label=NAMES[name])
            stage_start += stage_s
        axes.set_ylim(0, 1.35 * top)
        axes.set_ylabel("connections/s")
        axes.set_title(f"{record['how']}, {record['vms']} guests")
    panels[-1][0].set_xlabel("time since the command (s)")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8)
    style.title(figure, "A guest's service while its host is rebooted (the paper's figure 8)")
    style.save(figure, path)
