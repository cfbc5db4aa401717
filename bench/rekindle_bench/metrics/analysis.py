"""Computes the figures and tables of `rekindle metrics` from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each window and page load; `rows.Row` documents its columns.
"""

import json
from collections.abc import Sequence

import pandas as pd

from rekindle_bench.report import Bar, Findings
from rekindle_bench.rows import matching, milliseconds, pick
from rekindle_lab.stats import median, p95, p99

LEAST_LOADS = 10
LEAST_FRAME_WINDOWS = 5
"""With fewer repetitions, the bar is missed."""
FRAME_BAR_MS = 50.0


def _least(values: Sequence[float], least: int) -> int | None:
    """Returns `Figure.planned`: only for fewer values than required."""
    return least if len(values) < least else None


def _percent(frame: pd.DataFrame) -> list[float]:
    """Returns the processor time of each window, as a percentage of one core."""
    windows = matching(frame, case="cost")
    return [
        100 * float(cpu) / float(window) for cpu, window in zip(windows["cpu_us"], windows["window_us"], strict=True)
    ]


def _frames_ms(frame: pd.DataFrame) -> list[list[float]]:
    """Returns the times between frames, of each window."""
    return [milliseconds(json.loads(text)) for text in matching(frame, case="frames")["frames_us"]]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    if percent := _percent(frame):
        findings.add("metrics_cost", percent, "% of one core", Bar(1.0))
    else:
        findings.report_missing("metrics_cost")
    if ready := milliseconds(pick(frame, "ready_us", case="load")):
        planned = _least(ready, LEAST_LOADS)
        findings.add("page_200_ready", ready, "ms", Bar(1000.0), planned=planned, extra={"worst": max(ready)})
    else:
        findings.report_missing("page_200_ready")
    if windows := _frames_ms(frame):
        worst = [max(window) for window in windows]
        every = [ms for window in windows for ms in window]
        findings.add(
            "page_200_frame",
            worst,
            "ms",
            Bar(FRAME_BAR_MS),
            value=max(worst),
            planned=_least(worst, LEAST_FRAME_WINDOWS),
            extra={
                "frames": float(len(every)),
                "frames_above_bar": float(sum(ms > FRAME_BAR_MS for ms in every)),
                "frames_median": median(every),
                "frames_p95": p95(every),
                "frames_p99": p99(every),
            },
        )
    else:
        findings.report_missing("page_200_frame")
    return findings


def costs(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the windows of scrapes."""
    windows = matching(frame, case="cost").to_dict("records")
    return [
        {
            "window": window["round"],
            "guests": window["guests"],
            "s": window["window_us"] / 1e6,
            "checkpoints/s": window["checkpoints"] / (window["window_us"] / 1e6),
            "scrapes": int(window["scrapes"]),
            "kB": window["bytes"] / 1e3,
            "processor ms": window["cpu_us"] / 1e3,
            "% of one core": percent,
        }
        for window, percent in zip(windows, _percent(frame), strict=True)
    ]


def loads(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the points that a load of the page reaches."""
    points = {"script ready": "interactive_us", "all rows": "complete_us", "both, drawn": "ready_us"}
    lines: list[dict[str, object]] = []
    for name, column in points.items():
        values = milliseconds(pick(frame, column, case="load"))
        if values:
            lines.append(
                {"until": name, "n": len(values), "ms": median(values), "p95": p95(values), "worst": max(values)}
            )
    return lines


def frames(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the distribution of the times between frames, by window."""
    windows = matching(frame, case="frames").to_dict("records")
    return [
        {
            "window": window["round"],
            "guests": window["guests"],
            "checkpoints/s": window["checkpoints"] / (window["window_us"] / 1e6),
            "frames": len(values),
            "median ms": median(values),
            "p95": p95(values),
            "p99": p99(values),
            "worst": max(values),
            f"above {FRAME_BAR_MS:g} ms": sum(ms > FRAME_BAR_MS for ms in values),
        }
        for window, values in zip(windows, _frames_ms(frame), strict=True)
    ]
