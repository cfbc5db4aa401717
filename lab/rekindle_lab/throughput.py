"""Draws throughput over time around a reboot, with the reboot's phases: the paper's figure 8, and the demo's."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from rekindle_lab import style
from rekindle_lab.records import Record

STEPS = 120
"""Approximate largest number of intervals in a panel."""


def window(record: Record) -> tuple[float, float]:
    """Returns the limits of a panel, in s from the guest's stop: the outage, and 1 s or a third of it on both sides."""
    start, end, length = record.gap
    outage = length / 1e6
    margin = max(1.0, 0.35 * outage)
    begin = min((start - record.zero_host_us) / 1e6 if start else 0.0, 0.0)
    last = max((end - record.zero_host_us) / 1e6 if end else outage, 0.0)
    edges, _ = record.throughput()
    return max(begin - margin, float(edges[0])), min(last + margin, float(edges[-1]))


def panel(axes: Axes, record: Record, top: float, limits: tuple[float, float]) -> None:
    """Draws one reboot. `top`: the end of the y axis, in requests per second; `limits`: of the time axis, in s."""
    begin, end = limits
    edges, rates = record.throughput(max(1, round((end - begin) * 1e3 / record.probe["interval_ms"] / STEPS)))
    colour = style.COLOURS.get(record.how, style.FALLBACK)
    axes.stairs(rates, edges, color=colour, fill=True, alpha=0.25, linewidth=0)
    axes.stairs(rates, edges, color=colour, linewidth=1.4, baseline=None)
    for left, right in ((begin, edges[0]), (edges[-1], end)):
        if right - left > 0.02 * (end - begin):
            axes.axvspan(left, right, facecolor="none", edgecolor="#DDDDDD", hatch="///", linewidth=0)
            axes.text((left + right) / 2, top * 0.5, "not watched", ha="center", color="#888888")
    axes.set_xlim(begin, end)
    axes.set_ylim(0, top * 1.3)
    span = end - begin
    phases = [(n, (a - record.zero_host_us) / 1e6, (b - record.zero_host_us) / 1e6) for n, a, b in record.phases]
    for name, left, right in phases:
        width = max(right - left, span * 0.0015)
        axes.barh(top * 1.22, width, left=left, height=top * 0.09, color=style.PHASES.get(name, style.FALLBACK))
    if record.stopped_ms is not None and record.stop_host_us is not None and record.resume_host_us is not None:
        resumed = (record.resume_host_us - record.zero_host_us) / 1e6
        axes.axvspan(0, max(resumed, span * 0.0015), color="#000000", alpha=0.12, linewidth=0)
    stopped = "" if record.stopped_ms is None else f"guest stopped {style.duration(record.stopped_ms)}, "
    gap = style.duration(record.gap_ms)
    axes.set_title(f"{record.how}: {stopped}service gap {gap}, requests lost {record.lost}")
    axes.set_ylabel("requests/s")


def draw(records: Sequence[Record], path: Path, *, title: str = "", same_time: bool = True) -> None:
    """Draws a panel for each reboot. All have the same y axis; `same_time`: they have the same time axis, too."""
    style.apply()
    height = 1.2 + 2.1 * len(records)
    figure, all_axes = plt.subplots(len(records), 1, figsize=(9, height), squeeze=False, layout="constrained")
    rates = [record.throughput()[1] for record in records]
    top = max((float(np.quantile(r, 0.99)) for r in rates if r.size), default=1.0) or 1.0
    windows = [window(record) for record in records]
    if same_time:
        windows = [(min(begin for begin, _ in windows), max(end for _, end in windows))] * len(windows)
    for axes, record, limits in zip(all_axes[:, 0], records, windows, strict=True):
        panel(axes, record, top, limits)
    note = "" if same_time else "; each panel has its own scale"
    all_axes[-1, 0].set_xlabel(f"time since the guest was stopped or its shutdown requested (s){note}")
    seen = list(dict.fromkeys(name for record in records for name, _, _ in record.phases))
    handles = [plt.Rectangle((0, 0), 1, 1, color=style.PHASES.get(name, style.FALLBACK)) for name in seen]
    if handles:
        handles.append(plt.Rectangle((0, 0), 1, 1, color="#000000", alpha=0.12))
        figure.legend(handles, [*seen, "guest stopped"], loc="outside lower center", ncols=len(handles))
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    style.save(figure, path)
