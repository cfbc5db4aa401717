"""Computes the figure and tables of moves between hosts from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each move; `rows.Row` documents its columns, `rows.HOWS` the ways to move (column `how`).
"""

import json
from collections.abc import Callable

import pandas as pd

from rekindle_bench.report import Bar, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, pick, seconds
from rekindle_lab.guests import size
from rekindle_lab.peers.migrate import LIVE
from rekindle_lab.stats import median, p95

from .rows import STORES, THERE

SMALL_MIB = 512
LINKS = {"s3": "through an object store", "tls": "over TLS"}
"""How `rekindle move` reaches a store, by its kind. `tls`: a server of Rekindle, which earlier rows have."""
LOAD = "dirty 20"
"""The load for which the figure is computed: an idle guest has next to nothing to send in a pause."""


def stopped_ms(frame: pd.DataFrame, **where: float | str) -> list[float]:
    """Returns guest-stopped times in ms."""
    return milliseconds(pick(frame, "stopped_us", **where))


def best_live(frame: pd.DataFrame, load: str, mib: float) -> str | None:
    """Returns the live migration with the shortest median guest-stopped time, among those that always converge."""
    medians_us = {}
    for how in LIVE:
        stopped_us = matching(frame, load=load, memory_mib=mib, how=how)["stopped_us"]
        if len(stopped_us) and stopped_us.notna().all():
            medians_us[how] = median(list(stopped_us))
    return min(medians_us, key=medians_us.__getitem__, default=None)


def _store(frame: pd.DataFrame) -> str:
    """Returns the kind of the store through which `move` goes."""
    kinds = set(matching(frame, how="move")["store"])
    return str(kinds.pop()) if len(kinds) == 1 else STORES["move"]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figure with its bar, against QEMU's best way. `raw`: name of the file of rows."""
    findings = Findings(raw)
    best = best_live(frame, LOAD, SMALL_MIB) or "live"
    ours_is = f"rekindle move {LINKS[_store(frame)]}, {size(SMALL_MIB)}, {LOAD} MB/s"
    peer_is = f"QEMU's live migration of the same, downtime limit {LIVE[best]} ms"
    small = matching(frame, load=LOAD, memory_mib=SMALL_MIB)
    findings.add_ratio(
        "move_stopped_vs_live",
        Bar(1.0),
        ours=Sample(ours_is, stopped_ms(small, how="move")),
        peer=Sample(peer_is, stopped_ms(small, how=best)),
        extra=_all_ratios(frame),
    )
    migrations = frame[frame["how"].isin(LIVE)]
    for (mib, load, how), group in migrations.groupby(["memory_mib", "load", "how"], sort=True):
        not_converged = int(group["stopped_us"].isna().sum())
        if not_converged:
            findings.absent.append(f"{how}, {size(int(mib))}, {load}: {not_converged} of {len(group)} did not converge")
    return findings


def _all_ratios(frame: pd.DataFrame) -> dict[str, float]:
    """Compares the guest-stopped time of `move` with each live migration and with `move-local`, by load and size."""
    ratios = {}
    for load, load_name in ((LOAD, "ratio_dirty"), ("idle", "ratio_idle")):
        for mib in sorted(set(frame["memory_mib"])):
            name = f"{load_name}_{size(int(mib)).lower()}"
            rows = matching(frame, load=load, memory_mib=mib)
            ours = stopped_ms(rows, how="move")
            peers = {f"{name}_{how}": stopped_ms(rows, how=how) for how in LIVE}
            peers[f"{name}_{_store(frame)}_to_local"] = stopped_ms(rows, how="move-local")
            if (best := best_live(frame, load, mib)) is not None:
                peers = {name: stopped_ms(rows, how=best), **peers}
            ratios |= {key: median(ours) / median(theirs) for key, theirs in peers.items() if ours and theirs}
    return ratios


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
        stopped = stopped_ms(group)
        lines.append(
            {
                "guest": size(int(mib)),
                "load": load,
                "how": how,
                "n": len(stopped),
                "not converged": int(group["stopped_us"].isna().sum()) if how in LIVE else None,
                "stopped ms": median_or_none(stopped),
                "p95": p95(stopped) if stopped else None,
                "paused before ms": median_or_none(milliseconds(pick(group, "pauses_us"))),
                "runs there after s": median_or_none(seconds(pick(group, "total_us"))),
                "whole s": median_or_none(seconds(pick(group, "whole_us"))),
                "degraded": degraded(group),
            }
        )
    return lines


def pauses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians of the parts of a move's pause, in ms."""
    return _medians_of_steps(frame, lambda step: None if step.startswith(THERE) else f"{step} ms")


def there(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians of the steps on the destination host, in ms."""
    return _medians_of_steps(frame, lambda step: f"{step.removeprefix(THERE)} ms" if step.startswith(THERE) else None)


def _medians_of_steps(frame: pd.DataFrame, column_of: Callable[[str], str | None]) -> list[dict[str, object]]:
    """Lists medians of Rekindle's steps. `column_of`: returns the column of a step; `None`: not in the table."""
    lines: list[dict[str, object]] = []
    moves = frame[frame["how"].isin(STORES)]
    for (mib, load, how), group in moves.groupby(["memory_mib", "load", "how"], sort=True):
        durations_ms: dict[str, list[float]] = {}
        for text in group["steps"].dropna():
            for step in json.loads(text):
                if (column := column_of(step["step"])) is not None:
                    durations_ms.setdefault(column, []).append(step["us"] / 1e3)
        if durations_ms:
            medians = {column: median(values) for column, values in durations_ms.items()}
            lines.append({"guest": size(int(mib)), "load": load, "how": how, "n": len(group), **medians})
    return lines
