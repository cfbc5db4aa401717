"""Computes the figures and tables of checkpoints from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each checkpoint, save by a peer, or piece of work (*window*); `rows.Row` documents its columns.
`how` is Rekindle's policy (`default`, `cow`: pages are copied when the guest writes them; `basic`: while the guest is
stopped), `none`, or a peer.
"""

from collections.abc import Sequence

import pandas as pd

from rekindle_bench.report import Bar, Contrast, Findings, Sample
from rekindle_bench.rows import matching, milliseconds, pick, seconds
from rekindle_lab.guests import size
from rekindle_lab.peers.snapshot import WAYS
from rekindle_lab.stats import Comparison, compare, median, p95, ratio_interval

from .rows import DEFAULT, ENCRYPTED, PLAIN, POLICIES

EVERY_S = 2.0
"""The interval in s for which figures are quoted: the default of `rekindle protect`."""
KEPT = 1.05
"""A configured interval counts as kept if the median actual interval is at most this times as long."""
PAUSE_SIZES_MIB = (512, 2048)
LARGE_BYTES = 1 << 20
"""Smaller checkpoints are left out of `bytes_vs_dirty`, since they are mostly device state and bookkeeping."""
COMPILING = {"case": "intervals", "workload": "compile", "store": "disk"}
"""Columns of the rows at all intervals for the guest of the figures: it compiles, its store is a folder."""


def steady(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the checkpoints in the steady state: omits full checkpoints, and those without an interval."""
    checkpoints = matching(frame, what="checkpoint", full=0)
    return checkpoints[checkpoints["interval_ms"].notna()]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _pause_vs_peer(frame, findings)
    _pause_vs_basic(frame, findings)
    _bytes(frame, findings)
    checkpoints_s = seconds(pick(frame, "took_us", case="commit", what="checkpoint"))
    copies_s = seconds(pick(frame, "took_us", case="commit", what="dd"))
    findings.add_ratio(
        "commit_vs_dd",
        Bar(1.5),
        ours=Sample("a checkpoint of 46 MB", checkpoints_s),
        peer=Sample("dd conv=fdatasync", copies_s),
        unit="s",
    )
    _encrypt_cost(frame, findings)
    _interval_kept(frame, findings)
    _slowdown(frame, findings, "compile", "slowdown_2s", limit=0.04)
    _slowdown(frame, findings, "transcode", "slowdown_2s_transcoding", limit=0.02)
    compared = matching(frame, what="compare")
    if not len(compared):
        findings.report_missing("pages_wrong_1000")
        return findings
    wrong = [float(pages) for pages in compared["wrong"]]
    extra = {
        "checkpoints": float(compared["checkpoints"].max()),
        "pages_compared": float(compared["pages"].min()),
        "written_since": float(compared["written_since"].max()),
    }
    findings.add("pages_wrong_1000", wrong, "pages", Bar(0.0, "=="), value=sum(wrong), extra=extra)
    return findings


def _encrypt_cost(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds what encryption costs in a checkpoint of 46 MB: the pause, and the commit."""
    for name, limit, column in (("encrypt_cost_pause", 1.05, "stopped_us"), ("encrypt_cost_commit", 1.3, "took_us")):
        encrypted_ms, plain_ms = (
            milliseconds(pick(frame, column, case="encryption", what="checkpoint", store=kind))
            for kind in (ENCRYPTED, PLAIN)
        )
        ours, peer = Sample("encrypted", encrypted_ms), Sample("not encrypted", plain_ms)
        findings.add_ratio(name, Bar(limit), ours=ours, peer=peer)


def stopped_ms(frame: pd.DataFrame, case: str, how: str, **where: float | str) -> list[float]:
    """Returns guest-stopped times in ms."""
    rows = matching(frame, case=case, how=how, **where)
    return milliseconds(pick(rows[rows["what"].isin(("checkpoint", "save"))], "stopped_us"))


def _pause_vs_peer(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds `pause_vs_background_snapshot` for the size of guest with the worst ratio."""
    name, peer = "pause_vs_background_snapshot", WAYS[0]
    by_size = {
        mib: (
            Sample(f"{DEFAULT}, {size(mib)}", stopped_ms(frame, "pause", DEFAULT, memory_mib=mib)),
            Sample(f"{peer}, {size(mib)}", stopped_ms(frame, "pause", peer, memory_mib=mib)),
        )
        for mib in PAUSE_SIZES_MIB
    }
    ratios = {
        mib: median(ours.values) / median(theirs.values)
        for mib, (ours, theirs) in by_size.items()
        if ours.values and theirs.values
    }
    if ratios:
        ours, theirs = by_size[max(ratios, key=ratios.__getitem__)]
        extra = {f"ratio_{size(mib)}": ratio for mib, ratio in ratios.items()}
        findings.add_ratio(name, Bar(1.0), ours=ours, peer=theirs, extra=extra)
    for mib in by_size:
        if mib not in ratios:
            findings.report_missing(name, size(mib))


def _pause_vs_basic(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds `pause_vs_basic` for the worse of the other two policies: the paper's figure 2."""
    at_interval = matching(frame, **COMPILING, every_s=EVERY_S)
    basic = stopped_ms(at_interval, "intervals", "basic")
    by_policy = {}
    for how in (DEFAULT, "cow"):
        stopped = stopped_ms(at_interval, "intervals", how)
        if stopped and basic:
            by_policy[how] = stopped
        else:
            findings.report_missing("pause_vs_basic", how)
    if by_policy:
        worst = max(by_policy, key=lambda how: median(by_policy[how]))
        findings.add_ratio(
            "pause_vs_basic",
            Bar(0.08),
            ours=Sample(f"{worst}, every {EVERY_S:g} s", by_policy[worst]),
            peer=Sample("basic", basic),
            with_peer=False,
            extra=_vs_basic_by_interval(frame),
        )


def _vs_basic_by_interval(frame: pd.DataFrame) -> dict[str, float]:
    """Compares the pause of each policy with that of `basic`, for every interval."""
    ratios = {}
    for every_s in sorted(matching(frame, case="intervals")["every_s"].dropna().unique()):
        at_interval = matching(frame, **COMPILING, every_s=every_s)
        basic = stopped_ms(at_interval, "intervals", "basic")
        for how in (DEFAULT, "cow"):
            stopped = stopped_ms(at_interval, "intervals", how)
            if stopped and basic:
                ratios[f"ratio_{how}_{every_s:g}s"] = median(stopped) / median(basic)
    return ratios


def _bytes(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the ratio of bytes written to the compressed size of the dirty pages, without small checkpoints."""
    rows = matching(steady(frame), **COMPILING, every_s=EVERY_S)
    rows = rows[rows["compressed_bytes"] >= LARGE_BYTES]
    ratios = {how: list(of_policy["bytes"] / of_policy["compressed_bytes"]) for how, of_policy in rows.groupby("how")}
    if DEFAULT not in ratios:
        findings.report_missing("bytes_vs_dirty")
        return
    extra = {f"median_{how}": median(values) for how, values in ratios.items()}
    findings.add("bytes_vs_dirty", ratios[DEFAULT], "", Bar(1.1), extra=extra)


def _interval_kept(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the smallest configured interval that was kept, provided that all longer ones were kept, too."""
    rows = matching(steady(frame), **COMPILING, how=DEFAULT)
    actual_s = {
        float(str(every_s)): [interval / 1e3 for interval in at_interval["interval_ms"]]
        for every_s, at_interval in rows.groupby("every_s")
    }
    kept_s: float | None = None
    for every_s in sorted(actual_s, reverse=True):
        if median(actual_s[every_s]) > KEPT * every_s:
            break
        kept_s = every_s
    if not actual_s:
        findings.report_missing("interval_kept")
    elif kept_s is None:
        findings.report_missing("interval_kept", "an interval that was kept")
    else:
        extra = {f"actual_{every_s:g}s": median(values) for every_s, values in sorted(actual_s.items())}
        findings.add("interval_kept", actual_s[kept_s], "s", Bar(0.25), value=kept_s, extra=extra)


def _slowdown(frame: pd.DataFrame, findings: Findings, workload: str, name: str, *, limit: float) -> None:
    """Adds by how much longer the same work takes with protection: ratio of medians less 1, with its interval."""
    windows = matching(frame, case="slowdown", workload=workload, what="window")
    protected = Sample(f"{workload}, every {EVERY_S:g} s", seconds(pick(windows, "window_us", how=DEFAULT)))
    unprotected = Sample("without", seconds(pick(windows, "window_us", how="none")))
    if len(protected.values) < 2 or len(unprotected.values) < 2:
        findings.report_missing(name)
        return
    contrast = Contrast.of(protected, unprotected, "s", with_peer=False)
    low, high = ratio_interval(protected.values, unprotected.values)
    findings.add(
        name,
        protected.values,
        "",
        Bar(limit),
        value=contrast.result.ratio - 1,
        n=min(contrast.result.n_ours, contrast.result.n_peer),
        p95=contrast.result.ours_p95 / contrast.result.peer_p95 - 1,
        contrast=contrast,
        extra={"slowdown_low": low - 1, "slowdown_high": high - 1},
    )


def table_1(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's table I: size, commit time, actual interval, by workload, store, configured interval."""
    rows = matching(steady(frame), case="intervals", how=DEFAULT)
    lines: list[dict[str, object]] = []
    for (workload, store, every_s), group in rows.groupby(["workload", "store", "every_s"], sort=True):
        lines.append(
            {
                "workload": workload,
                "store": store,
                "every s": every_s,
                "n": len(group),
                "dirty MB": median(list(group["dirty_bytes"])) / 1e6,
                "written MB": median(list(group["bytes"])) / 1e6,
                "commit s": median(list(group["commit_us"])) / 1e6,
                "whole s": median(list(group["took_us"])) / 1e6,
                "actual s": median(list(group["interval_ms"])) / 1e3,
            }
        )
    return lines


def overheads(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's figure 3: overhead of a workload, and the workload's level of protection.

    Overhead: the window compared with those without protection in the same cell. Level of protection (V-C): checkpoints
    per second; one a second is 100 %.
    """
    windows = matching(frame, case="intervals", what="window")
    lines: list[dict[str, object]] = []
    for (cell, workload), group in windows.groupby(["round", "workload"], sort=True):
        unprotected_us = pick(group, "window_us", how="none")
        if not unprotected_us:
            continue
        mean_unprotected_us = sum(unprotected_us) / len(unprotected_us)
        for _, row in group[group["how"] != "none"].iterrows():
            window_s = row["window_us"] / 1e6
            lines.append(
                {
                    "workload": workload,
                    "store": row["store"],
                    "policy": row["how"],
                    "every s": row["every_s"],
                    "overhead %": 100 * (row["window_us"] / mean_unprotected_us - 1),
                    "level %": 100 * row["checkpoints"] / window_s,
                    "protector's CPU %": 100 * row["cpu_us"] / 1e6 / window_s,
                    "peak MB": row["peak_kib"] / 1024,
                    "cell": cell,
                }
            )
    return lines


def pauses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists guest-stopped times by size and way, and the ratio of the default to each way, with an interval."""
    lines: list[dict[str, object]] = []
    for mib in sorted(matching(frame, case="pause")["memory_mib"].unique()):
        ours = stopped_ms(frame, "pause", DEFAULT, memory_mib=mib)
        for how in (*POLICIES, *WAYS):
            values = stopped_ms(frame, "pause", how, memory_mib=mib)
            if not values:
                continue
            comparison = versus(ours, values) if how != DEFAULT else None
            lines.append(
                {
                    "guest": size(int(mib)),
                    "how": how,
                    "n": len(values),
                    "stopped ms": median(values),
                    "p95": p95(values),
                    "default / this": comparison.ratio if comparison else None,
                    "low": comparison.low if comparison else None,
                    "high": comparison.high if comparison else None,
                }
            )
    return lines


def versus(ours: Sequence[float], peer: Sequence[float]) -> Comparison | None:
    """Returns the comparison of two samples; `None` if a sample has too few values."""
    return compare(ours, peer) if len(ours) > 1 and len(peer) > 1 and min(peer) > 0 else None


def pauses_by_interval(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's figure 2: mean pause, with its parts, by policy and interval while the guest compiles."""
    rows = matching(steady(frame), case="intervals", workload="compile")
    lines: list[dict[str, object]] = []
    for (store, how, every_s), group in rows.groupby(["store", "how", "every_s"], sort=True):
        values = milliseconds(pick(group, "stopped_us"))
        lines.append(
            {
                "store": store,
                "policy": how,
                "every s": every_s,
                "n": len(values),
                "mean ms": sum(values) / len(values),
                "median ms": median(values),
                "p95": p95(values),
                "copied while stopped MB": median(list(group["copied_stopped_bytes"])) / 1e6,
            }
        )
    return lines


def written_rates(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists checkpoints of guests that write memory at a set rate, and of an idle guest."""
    rows = matching(steady(frame), case="rates")
    lines: list[dict[str, object]] = []
    for (rate, how), group in rows.groupby(["rate_mb", "how"], sort=True):
        lines.append(
            {
                "MB/s written": rate,
                "policy": how,
                "n": len(group),
                "dirty MB": median(list(group["dirty_bytes"])) / 1e6,
                "written MB": median(list(group["bytes"])) / 1e6,
                "stopped ms": median(milliseconds(pick(group, "stopped_us"))),
                "whole s": median(list(group["took_us"])) / 1e6,
                "actual s": median(list(group["interval_ms"])) / 1e3,
            }
        )
    return lines
