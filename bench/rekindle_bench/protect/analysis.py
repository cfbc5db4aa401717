"""Computes the figures of checkpoints from raw rows alone, so that a file can be analysed again."""

from collections.abc import Sequence

import pandas as pd

from rekindle_bench.report import Bar, Figure, Findings
from rekindle_bench.rows import milliseconds, pick
from rekindle_lab.guests import size
from rekindle_lab.peers.snapshot import WAYS
from rekindle_lab.stats import Comparison, compare, median, p95, ratio_interval

from .rows import DEFAULT, POLICIES

EVERY_S = 2.0
"""The interval in s for which figures are quoted: the default of `rekindle protect`."""
KEPT = 1.05
"""A configured interval counts as kept if the median actual interval is at most this times as long."""
PAUSE_SIZES_MIB = (512, 2048)
LARGE_BYTES = 1 << 20
"""Smaller checkpoints are left out of `bytes_vs_dirty`, since they are mostly device state and bookkeeping."""


def steady(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the checkpoints in the steady state: omits full checkpoints, and those without an interval."""
    rows = frame[(frame["what"] == "checkpoint") & (frame["full"] == 0)]
    return rows[rows["interval_ms"].notna()]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _pauses(frame, findings)
    _bytes(frame, findings)
    commits = [value / 1e6 for value in pick(frame, "took_us", case="commit", what="checkpoint")]
    copies = [value / 1e6 for value in pick(frame, "took_us", case="commit", what="dd")]
    findings.ratio("commit_vs_dd", Bar(1.5), commits, copies, "a checkpoint of 46 MB", "dd conv=fdatasync", unit="s")
    _interval_kept(frame, findings)
    for workload, name, limit in (
        ("compile", "slowdown_2s", 0.04),
        ("transcode", "slowdown_2s_transcoding", 0.02),
    ):
        _slowdown(frame, findings, workload, name, limit)
    compared = frame[frame["what"] == "compare"]
    if len(compared):
        wrong = [float(value) for value in compared["wrong"]]
        extra = {
            "checkpoints": float(compared["checkpoints"].max()),
            "pages_compared": float(compared["pages"].min()),
            "written_since": float(compared["written_since"].max()),
        }
        findings.add_sample("pages_wrong_1000", "pages", wrong, Bar(0.0, "=="), value=sum(wrong), extra=extra)
    else:
        findings.report_missing("pages_wrong_1000")
    return findings


def stopped_ms(frame: pd.DataFrame, case: str, how: str, **where: float | str) -> list[float]:
    """Returns guest-stopped times in ms."""
    rows = frame[(frame["case"] == case) & (frame["how"] == how) & frame["what"].isin(("checkpoint", "save"))]
    return milliseconds(pick(rows, "stopped_us", **where))


def _pauses(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds `pause_vs_background_snapshot` for the worst size, and `pause_vs_basic` for the worse of both policies."""
    peer = WAYS[0]
    by_size = {
        mib: (stopped_ms(frame, "pause", DEFAULT, memory_mib=mib), stopped_ms(frame, "pause", peer, memory_mib=mib))
        for mib in PAUSE_SIZES_MIB
    }
    samples = {mib: (ours, theirs) for mib, (ours, theirs) in by_size.items() if ours and theirs}
    name = "pause_vs_background_snapshot"
    if samples:
        worst = max(samples, key=lambda mib: median(samples[mib][0]) / median(samples[mib][1]))
        extra = {f"ratio_{size(mib)}": median(ours) / median(theirs) for mib, (ours, theirs) in samples.items()}
        findings.ratio(
            name, Bar(1.0), *samples[worst], f"{DEFAULT}, {size(worst)}", f"{peer}, {size(worst)}", extra=extra
        )
    for mib in by_size:
        if mib not in samples:
            findings.report_missing(name, size(mib))
    # The paper's figure 2: pauses by technique and interval, while the guest compiles.
    common = {"workload": "compile", "store": "disk", "every_s": EVERY_S}
    basic = stopped_ms(frame, "intervals", "basic", **common)
    others = {how: stopped_ms(frame, "intervals", how, **common) for how in (DEFAULT, "cow")}
    known = {how: values for how, values in others.items() if values and basic}
    for how in others:
        if how not in known:
            findings.report_missing("pause_vs_basic", how)
    if known:
        worst_how = max(known, key=lambda how: median(known[how]))
        findings.ratio(
            "pause_vs_basic",
            Bar(0.08),
            known[worst_how],
            basic,
            f"{worst_how}, every {EVERY_S:g} s",
            "basic",
            of_peer=False,
            extra=_by_interval(frame),
        )


def _by_interval(frame: pd.DataFrame) -> dict[str, float]:
    """Compares the pause of each policy with that of `basic`, for every interval."""
    ratios = {}
    for every_s in sorted(frame.loc[frame["case"] == "intervals", "every_s"].dropna().unique()):
        where = {"workload": "compile", "store": "disk", "every_s": every_s}
        basic = stopped_ms(frame, "intervals", "basic", **where)
        for how in (DEFAULT, "cow"):
            ours = stopped_ms(frame, "intervals", how, **where)
            if ours and basic:
                ratios[f"ratio_{how}_{every_s:g}s"] = median(ours) / median(basic)
    return ratios


def _bytes(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the ratio of bytes written to the compressed size of the dirty pages, without small checkpoints."""
    rows = steady(frame)
    rows = rows[(rows["case"] == "intervals") & (rows["workload"] == "compile") & (rows["store"] == "disk")]
    rows = rows[(rows["compressed_bytes"] >= LARGE_BYTES) & (rows["every_s"] == EVERY_S)]
    ratios = {how: list(g["bytes"] / g["compressed_bytes"]) for how, g in rows.groupby("how") if len(g)}
    if DEFAULT not in ratios:
        findings.report_missing("bytes_vs_dirty")
        return
    values = ratios[DEFAULT]
    extra = {f"median_{how}": median(list(those)) for how, those in ratios.items()}
    findings.add_sample("bytes_vs_dirty", "", values, Bar(1.1), extra=extra)


def _interval_kept(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the smallest configured interval that was kept, provided that all longer ones were kept, too."""
    rows = steady(frame)
    rows = rows[(rows["case"] == "intervals") & (rows["workload"] == "compile") & (rows["store"] == "disk")]
    actual = {
        float(str(every_s)): [value / 1e3 for value in group["interval_ms"]]
        for every_s, group in rows[rows["how"] == DEFAULT].groupby("every_s")
    }
    kept: float | None = None
    for every_s in sorted(actual, reverse=True):
        if median(actual[every_s]) > KEPT * every_s:
            break
        kept = every_s
    if not actual:
        findings.report_missing("interval_kept")
    elif kept is None:
        findings.report_missing("interval_kept", "an interval that was kept")
    else:
        values = actual[kept]
        extra = {f"actual_{every_s:g}s": median(those) for every_s, those in sorted(actual.items())}
        findings.add_sample("interval_kept", "s", values, Bar(0.25), value=kept, extra=extra)


def _slowdown(frame: pd.DataFrame, findings: Findings, workload: str, name: str, limit: float) -> None:
    """Adds by how much longer the same work takes with protection: ratio of medians less 1, with its interval."""
    rows = frame[(frame["case"] == "slowdown") & (frame["workload"] == workload)]
    with_it = [value / 1e6 for value in pick(rows, "window_us", what="window", how=DEFAULT)]
    without = [value / 1e6 for value in pick(rows, "window_us", what="window", how="none")]
    if len(with_it) < 2 or len(without) < 2:
        findings.report_missing(name)
        return
    of = compare(with_it, without)
    low, high = ratio_interval(with_it, without)
    extra = {"slowdown_low": low - 1, "slowdown_high": high - 1}
    value = of.ratio - 1
    n = min(of.n_ours, of.n_peer)
    tail = of.ours_p95 / of.peer_p95 - 1
    findings.add(
        Figure(
            name,
            value,
            "",
            n,
            tail,
            Bar(limit),
            findings.raw,
            of,
            "s",
            f"{workload}, every {EVERY_S:g} s",
            "without",
            of_peer=False,
            extra=extra,
        )
    )


def table_1(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's table I: size, commit time, actual interval, by workload, store, configured interval."""
    rows = steady(frame)
    rows = rows[(rows["case"] == "intervals") & (rows["how"] == DEFAULT)]
    lines: list[dict[str, object]] = []
    keys = ["workload", "store", "every_s"]
    for (workload, store, every_s), group in rows.groupby(keys, sort=True):
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
    rows = frame[(frame["case"] == "intervals") & (frame["what"] == "window")]
    lines: list[dict[str, object]] = []
    for (number, workload), group in rows.groupby(["round", "workload"], sort=True):
        without = pick(group, "window_us", how="none")
        if not without:
            continue
        base = sum(without) / len(without)
        for _, row in group[group["how"] != "none"].iterrows():
            seconds = row["window_us"] / 1e6
            lines.append(
                {
                    "workload": workload,
                    "store": row["store"],
                    "policy": row["how"],
                    "every s": row["every_s"],
                    "overhead %": 100 * (row["window_us"] / base - 1),
                    "level %": 100 * row["checkpoints"] / seconds,
                    "protector's CPU %": 100 * row["cpu_us"] / 1e6 / seconds,
                    "peak MB": row["peak_kib"] / 1024,
                    "cell": number,
                }
            )
    return lines


def pauses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists guest-stopped times by size and way, and the ratio of the default to each way, with an interval."""
    lines: list[dict[str, object]] = []
    for mib in sorted(frame[frame["case"] == "pause"]["memory_mib"].unique()):
        ours = stopped_ms(frame, "pause", DEFAULT, memory_mib=mib)
        for how in (*POLICIES, *WAYS):
            values = stopped_ms(frame, "pause", how, memory_mib=mib)
            if not values:
                continue
            of = versus(ours, values) if how != DEFAULT else None
            lines.append(
                {
                    "guest": size(int(mib)),
                    "how": how,
                    "n": len(values),
                    "stopped ms": median(values),
                    "p95": p95(values),
                    "default / this": of.ratio if of else None,
                    "low": of.low if of else None,
                    "high": of.high if of else None,
                }
            )
    return lines


def versus(ours: Sequence[float], peer: Sequence[float]) -> Comparison | None:
    """Returns the comparison of two samples; `None` if a sample has too few values."""
    return compare(ours, peer) if len(ours) > 1 and len(peer) > 1 and min(peer) > 0 else None


def pauses_by_interval(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's figure 2: mean pause, with its parts, by policy and interval while the guest compiles."""
    rows = steady(frame)
    rows = rows[(rows["case"] == "intervals") & (rows["workload"] == "compile")]
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
    rows = steady(frame)
    lines: list[dict[str, object]] = []
    for (rate, how), group in rows[rows["case"] == "rates"].groupby(["rate_mb", "how"], sort=True):
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
