"""From raw rows to figures. Reads nothing but the rows, so that a file can be analysed again."""

import json

import pandas as pd

from rekindle_lab.bench.report import Bar, Found
from rekindle_lab.bench.rows import milliseconds, pick
from rekindle_lab.guests import size
from rekindle_lab.stats import compare, median, p95

SMALL_MIB = 512
LOAD = "dirty 20"
"""The figure is of a guest that works: of an idle one there is next to nothing to be sent in any pause."""


def stopped(frame: pd.DataFrame, **where: float | str) -> list[float]:
    """Guest-stopped time, in ms."""
    return milliseconds(pick(frame, "stopped_us", **where))


def figures(frame: pd.DataFrame, raw: str) -> Found:
    """The figure of the issue's table. `raw`: the rows' file."""
    found = Found(raw)
    extra = {}
    for load, name in ((LOAD, "ratio_dirty"), ("idle", "ratio_idle")):
        for mib in sorted(set(frame["memory_mib"])):
            ours = stopped(frame, how="move", load=load, memory_mib=mib)
            theirs = stopped(frame, how="live", load=load, memory_mib=mib)
            if ours and theirs:
                extra[f"{name}_{size(int(mib)).lower()}"] = compare(ours, theirs).ratio
    found.ratio(
        "move_stopped_vs_live",
        Bar(1.0),
        stopped(frame, how="move", load=LOAD, memory_mib=SMALL_MIB),
        stopped(frame, how="live", load=LOAD, memory_mib=SMALL_MIB),
        f"rekindle move, {size(SMALL_MIB)}, {LOAD} MB/s",
        "QEMU's live migration of the same",
        extra=extra,
    )
    return found


def degraded(group: pd.DataFrame) -> float | None:
    """The paper's gamma: by how much less the service answered from the command until the guest was stopped."""
    pairs = group[["before_per_s", "during_per_s"]].dropna()
    pairs = pairs[pairs["before_per_s"] > 0]
    if pairs.empty:
        return None
    return median([1 - float(during) / float(before) for before, during in pairs.itertuples(index=False)])


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """A line for each size, load and way."""
    lines: list[dict[str, object]] = []
    for (mib, load, how), group in frame.groupby(["memory_mib", "load", "how"], sort=True):
        values = milliseconds(pick(group, "stopped_us"))
        whole = [value / 1e6 for value in pick(group, "whole_us")]
        total = [value / 1e6 for value in pick(group, "total_us")]
        pauses = milliseconds(pick(group, "pauses_us"))
        if not values:
            continue
        lines.append(
            {
                "guest": size(int(mib)),
                "load": load,
                "how": how,
                "n": len(values),
                "stopped ms": median(values),
                "p95": p95(values),
                "paused before ms": median(pauses) if pauses else None,
                "runs there after s": median(total) if total else None,
                "whole s": median(whole) if whole else None,
                "degraded": degraded(group),
            }
        )
    return lines


def pauses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Medians of the parts of a move's pause, in ms."""
    lines: list[dict[str, object]] = []
    for (mib, load), group in frame[frame["how"] == "move"].groupby(["memory_mib", "load"], sort=True):
        parts: dict[str, list[float]] = {}
        for text in group["steps"].dropna():
            for step in json.loads(text):
                parts.setdefault(step["step"], []).append(step["us"] / 1e3)
        if parts:
            values = {f"{name} ms": median(value) for name, value in parts.items()}
            lines.append({"guest": size(int(mib)), "load": load, "n": len(group), **values})
    return lines
