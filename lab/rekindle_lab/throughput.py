"""Draws throughput over time around a reboot (`draw`), with the reboot's phases: RootHammer's figure 8, and the demo's.

A panel shows one reboot (`Record`): good answers per second, when the guest was stopped, and above it the phases.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from rekindle_lab import style
from rekindle_lab.records import Record

MAX_INTERVALS = 120
"""Approximate largest number of intervals in a panel."""
GUEST_STOPPED_STYLE = {"color": "#000000", "alpha": 0.12}


class TimeRange(NamedTuple):
    """The time axis of a panel, in s from the guest's stop."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Length of the axis."""
        return self.end_s - self.begin_s


def draw(records: Sequence[Record], path: Path, *, title: str = "", same_time: bool = True) -> None:
    """Draws a panel for each reboot. All have the same y axis; `same_time`: they have the same time axis, too."""
    style.apply()
    height = 1.2 + 2.1 * len(records)
    figure, all_axes = plt.subplots(len(records), 1, figsize=(9, height), squeeze=False, layout="constrained")
    all_rates = [record.throughput().rates_per_s for record in records]
    top = max((float(np.quantile(rates, 0.99)) for rates in all_rates if rates.size), default=1.0) or 1.0
    time_ranges = [time_range(record) for record in records]
    if same_time:
        common = TimeRange(min(axis.begin_s for axis in time_ranges), max(axis.end_s for axis in time_ranges))
        time_ranges = [common] * len(records)
    for axes, record, time_axis in zip(all_axes[:, 0], records, time_ranges, strict=True):
        panel(axes, record, top, time_axis)
    note = "" if same_time else "; each panel has its own scale"
    all_axes[-1, 0].set_xlabel(f"time since the guest was stopped or its shutdown requested (s){note}")
    phase_names = list(dict.fromkeys(phase.name for record in records for phase in record.phases))
    handles = [plt.Rectangle((0, 0), 1, 1, color=_phase_colour(name)) for name in phase_names]
    if handles:
        handles.append(plt.Rectangle((0, 0), 1, 1, **GUEST_STOPPED_STYLE))
        figure.legend(handles, [*phase_names, "guest stopped"], loc="outside lower center", ncols=len(handles))
    if title:
        style.title(figure, title)
    style.save(figure, path)


def time_range(record: Record) -> TimeRange:
    """Returns the part of a record that its panel shows: the outage, and 1 s or a third of it on both sides."""
    gap = record.gap
    outage_s = gap.length_us / 1e6
    margin_s = max(1.0, 0.35 * outage_s)
    gap_begin_s = record.seconds_from_zero(gap.start_host_us) if gap.start_host_us else 0.0
    gap_end_s = record.seconds_from_zero(gap.end_host_us) if gap.end_host_us else outage_s
    edges_s = record.throughput().edges_s
    return TimeRange(
        max(min(gap_begin_s, 0.0) - margin_s, float(edges_s[0])),
        min(max(gap_end_s, 0.0) + margin_s, float(edges_s[-1])),
    )


def panel(axes: Axes, record: Record, top: float, time_axis: TimeRange) -> None:
    """Draws one reboot. `top`: the highest rate, in requests per second; there is room for the phases above it."""
    axes.set_xlim(time_axis.begin_s, time_axis.end_s)
    axes.set_ylim(0, top * 1.3)
    _draw_rates(axes, record, top, time_axis)
    shortest_visible_s = time_axis.length_s * 0.0015
    _draw_phases(axes, record, top, shortest_visible_s)
    stopped = ""
    if record.stopped_ms is not None:
        stopped = f"guest stopped {style.duration(record.stopped_ms)}, "
        if record.stop_host_us is not None and record.resume_host_us is not None:
            resumed_s = record.seconds_from_zero(record.resume_host_us)
            axes.axvspan(0, max(resumed_s, shortest_visible_s), **GUEST_STOPPED_STYLE, linewidth=0)
    gap = style.duration(record.gap_ms)
    axes.set_title(f"{record.how}: {stopped}service gap {gap}, requests lost {record.failed_requests}")
    axes.set_ylabel("requests/s")


def _draw_rates(axes: Axes, record: Record, top: float, time_axis: TimeRange) -> None:
    probe_intervals = time_axis.length_s * 1e3 / record.probe["interval_ms"]
    edges_s, rates = record.throughput(max(1, round(probe_intervals / MAX_INTERVALS)))
    colour = style.COLOURS.get(record.how, style.FALLBACK)
    axes.stairs(rates, edges_s, color=colour, fill=True, alpha=0.25, linewidth=0)
    axes.stairs(rates, edges_s, color=colour, linewidth=1.4, baseline=None)
    for left, right in ((time_axis.begin_s, edges_s[0]), (edges_s[-1], time_axis.end_s)):
        if right - left > 0.02 * time_axis.length_s:
            axes.axvspan(left, right, facecolor="none", edgecolor="#DDDDDD", hatch="///", linewidth=0)
            axes.text((left + right) / 2, top * 0.5, "not watched", ha="center", color="#888888")


def _draw_phases(axes: Axes, record: Record, top: float, shortest_visible_s: float) -> None:
    for phase in record.phases:
        left, right = record.seconds_from_zero(phase.begin_host_us), record.seconds_from_zero(phase.end_host_us)
        width = max(right - left, shortest_visible_s)
        axes.barh(top * 1.22, width, left=left, height=top * 0.09, color=_phase_colour(phase.name))


def _phase_colour(name: str) -> str:
    return style.PHASES.get(name, style.FALLBACK)
