"""Computes the figures of moves between hosts from raw rows alone, so that a file can be analysed again."""

import json
from collections.abc import Callable

import pandas as pd

from rekindle_bench.report import Bar, Findings
from rekindle_bench.rows import milliseconds, pick
from rekindle_lab.guests import size
from rekindle_lab.peers.migrate import LIVE
from rekindle_lab.stats import compare, median, p95

from .rows import STORES, THERE

SMALL_MIB = 512
LOAD = "dirty 20"
"""The load for which the figure is computed: an idle guest has next to nothing to send in a pause."""


def stopped(frame: pd.DataFrame, **where: float | str) -> list[float]:
    """Returns guest-stopped times in ms."""
    return milliseconds(pick(frame, "stopped_us", **where))


def best_live(frame: pd.DataFrame, load: str, mib: float) -> str | None:
    """Returns the live migration with the shortest median guest-stopped time, among those that always converge."""
    rows = frame[(frame["load"] == load) & (frame["memory_mib"] == mib)]
    medians = {}
    for how in LIVE:
        turns = rows[rows["how"] == how]
        if len(turns) and turns["stopped_us"].notna().all():
            medians[how] = median(list(turns["stopped_us"]))
    return min(medians, key=medians.__getitem__, default=None)


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figure with its bar, against QEMU's best way. `raw`: name of the file of rows."""
    findings = Findings(raw)
    extra = {}
    for load, name in ((LOAD, "ratio_dirty"), ("idle", "ratio_idle")):
        for mib in sorted(set(frame["memory_mib"])):
            size_text = size(int(mib)).lower()
            ours = stopped(frame, how="move", load=load, memory_mib=mib)
            if (best := best_live(frame, load, mib)) is not None and ours:
                extra[f"{name}_{size_text}"] = compare(ours, stopped(frame, how=best, load=load, memory_mib=mib)).ratio
            for how in LIVE:
                theirs = stopped(frame, how=how, load=load, memory_mib=mib)
                if ours and theirs:
                    extra[f"{name}_{size_text}_{how}"] = compare(ours, theirs).ratio
            local = stopped(frame, how="move-local", load=load, memory_mib=mib)
            if local and ours:
                extra[f"{name}_{size_text}_tls_to_local"] = compare(ours, local).ratio
    best = best_live(frame, LOAD, SMALL_MIB) or "live"
    findings.ratio(
        "move_stopped_vs_live",
        Bar(1.0),
        stopped(frame, how="move", load=LOAD, memory_mib=SMALL_MIB),
        stopped(frame, how=best, load=LOAD, memory_mib=SMALL_MIB),
        f"rekindle move over TLS, {size(SMALL_MIB)}, {LOAD} MB/s",
        f"QEMU's live migration of the same, downtime limit {LIVE[best]} ms",
        extra=extra,
    )
    for (mib, load, how), group in frame[frame["how"].isin(LIVE)].groupby(["memory_mib", "load", "how"], sort=True):
        failed = int(group["stopped_us"].isna().sum())
        if failed:
            findings.absent.append(f"{how}, {size(int(mib))}, {load}: {failed} of {len(group)} did not converge")
    return findings


def degraded(group: pd.DataFrame) -> float | None:
    """Returns the paper's gamma: by what share the service rate drops from the command until the guest is stopped."""
    pairs = group[["before_per_s", "during_per_s"]].dropna()
    pairs = pairs[pairs["before_per_s"] > 0]
    if pairs.empty:
        return None
    return median([1 - float(during) / float(before) for before, during in pairs.itertuples(index=False)])


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians by size, load and way."""
    lines: list[dict[str, object]] = []
    for (mib, load, how), group in frame.groupby(["memory_mib", "load", "how"], sort=True):
        values = milliseconds(pick(group, "stopped_us"))
        whole = [value / 1e6 for value in pick(group, "whole_us")]
        total = [value / 1e6 for value in pick(group, "total_us")]
        pauses = milliseconds(pick(group, "pauses_us"))
        if not len(group):
            continue
        lines.append(
            {
                "guest": size(int(mib)),
                "load": load,
                "how": how,
                "n": len(values),
                "not converged": int(group["stopped_us"].isna().sum()) if how in LIVE else None,
                "stopped ms": median(values) if values else None,
                "p95": p95(values) if values else None,
                "paused before ms": median(pauses) if pauses else None,
                "runs there after s": median(total) if total else None,
                "whole s": median(whole) if whole else None,
                "degraded": degraded(group),
            }
        )
    return lines


def pauses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians of the parts of a move's pause, in ms."""
    return _parts(frame, lambda name: None if name.startswith(THERE) else f"{name} ms")


def there(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians of the steps on the destination host, in ms."""
    return _parts(frame, lambda name: f"{name.removeprefix(THERE)} ms" if name.startswith(THERE) else None)


def _parts(frame: pd.DataFrame, column: Callable[[str], str | None]) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    moves = frame[frame["how"].isin(STORES)]
    for (mib, load, how), group in moves.groupby(["memory_mib", "load", "how"], sort=True):
        parts: dict[str, list[float]] = {}
        for text in group["steps"].dropna():
            for step in json.loads(text):
                if (name := column(step["step"])) is not None:
                    parts.setdefault(name, []).append(step["us"] / 1e3)
        if parts:
            values = {name: median(value) for name, value in parts.items()}
            lines.append({"guest": size(int(mib)), "load": load, "how": how, "n": len(group), **values})
    return lines
