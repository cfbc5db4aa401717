"""Computes the figures and tables of restores from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each restore, and for each piece of work (*window*) that a restore interrupted or that ran
undisturbed; `rows.Row` documents its columns, `rows.HOWS` the ways to restore (column `how`).
"""

import json

import pandas as pd

from rekindle_bench.report import Bar, Contrast, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, pick, seconds
from rekindle_lab.guests import size
from rekindle_lab.stats import median, p95, ratio_interval

from .rows import HOWS

SMALL_MIB, LARGE_MIB = 512, 8192
PAGE_BYTES = 4096
REST = "the rest"
"""Name of the time of a restore that belongs to no step, in the results of `steps`."""


def _restores(label: str, frame: pd.DataFrame, **where: float | str) -> Sample:
    """Returns the times from the command until the guest runs, in ms."""
    return Sample(label, milliseconds(pick(frame, "restore_us", what="restore", **where)))


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    small = _restores("lazy, 512M", frame, case="restore", memory_mib=SMALL_MIB, how="lazy")
    large = _restores("lazy, 8G", frame, case="restore", memory_mib=LARGE_MIB, how="lazy")
    peer = _restores("-incoming file:, 512M", frame, case="restore", memory_mib=SMALL_MIB, how="incoming")
    if small.values:
        contrast = Contrast.of(small, peer, "ms") if peer.values else None
        findings.add("restore_ms_512m", small.values, "ms", Bar(100.0), contrast=contrast)
    else:
        findings.report_missing("restore_ms_512m")
    findings.add_ratio("restore_8g_vs_512m", Bar(1.2), ours=large, peer=small, with_peer=False)
    _prepared(frame, findings)
    _slowdown(frame, findings, "compile", "slowdown_after_restore")
    _slowdown(frame, findings, "transcode", "slowdown_after_restore_transcoding")
    return findings


def _prepared(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the time of a restore into a prepared QEMU, and the memory that a prepared QEMU uses while it waits."""
    prepared = _restores("prepared", frame, case="prepared", how="prepared")
    fresh = _restores("not prepared", frame, case="prepared", how="lazy")
    if not prepared.values:
        findings.report_missing("restore_prepared_ms")
        return
    contrast = Contrast.of(prepared, fresh, "ms", with_peer=False) if fresh.values else None
    findings.add("restore_prepared_ms", prepared.values, "ms", Bar(20.0), contrast=contrast)
    resident_mib = [kib / 1024 for kib in pick(frame, "resident_kib", case="prepared", how="prepared")]
    if resident_mib:
        findings.add("restore_prepared_mb", resident_mib, "MB", Bar(60.0))


def _slowdown(frame: pd.DataFrame, findings: Findings, workload: str, name: str) -> None:
    """Compares the rest of a piece of work after a restore with the undisturbed rest, by the ratio of each pair."""
    windows = matching(frame, case="after", workload=workload, what="window")
    rest_us = windows.pivot_table(index="round", columns="how", values="rest_us") if len(windows) else pd.DataFrame()
    if not {"lazy", "undisturbed"} <= set(rest_us.columns) or len(rest_us.dropna()) < 2:
        findings.report_missing(name)
        return
    pairs_s = rest_us.dropna() / 1e6
    restored = Sample(f"{workload}, restored", list(pairs_s["lazy"]))
    undisturbed = Sample("undisturbed", list(pairs_s["undisturbed"]))
    ratios = list(pairs_s["lazy"] / pairs_s["undisturbed"])
    low, high = ratio_interval(ratios, [1.0] * len(ratios))
    findings.add(
        name,
        [ratio - 1 for ratio in ratios],
        "",
        Bar(0.04),
        contrast=Contrast.of(restored, undisturbed, "s", with_peer=False),
        extra={"slowdown_low": low - 1, "slowdown_high": high - 1},
    )


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists each case, size, store and way, with the peer: the paper's figure 4."""
    restores = matching(frame, what="restore")
    lines: list[dict[str, object]] = []
    for (case, mib, store, how), group in restores.groupby(["case", "memory_mib", "store", "how"], sort=True):
        restore_ms = milliseconds(pick(group, "restore_us"))
        lines.append(
            {
                "case": case,
                "guest": size(int(mib)),
                "store": store,
                "how": how,
                "n": len(restore_ms),
                "running after ms": median(restore_ms),
                "p95": p95(restore_ms),
                "all memory after s": median_or_none(seconds(pick(group, "fill_us"))),
                "waiting MB": median_or_none([kib / 1024 for kib in pick(group, "resident_kib")]),
            }
        )
    return lines


def table_2(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's table II: overhead of the second half of the work, and memory fetched."""
    lines: list[dict[str, object]] = []
    for workload, group in matching(frame, case="after").groupby("workload", sort=True):
        findings = Findings("")
        _slowdown(group, findings, str(workload), str(workload))
        figure = findings.figures[0] if findings.figures else None
        demanded_mb = [pages * PAGE_BYTES / 1e6 for pages in pick(group, "demanded_pages")]
        background_mb = [pages * PAGE_BYTES / 1e6 for pages in pick(group, "filled_pages")]
        longest_waits_ms = milliseconds(pick(group, "worst_us"))
        # 1 if the restored and the undisturbed work of a round gave the same result.
        digests = matching(group, what="window").groupby("round")["digest"].nunique()
        lines.append(
            {
                "workload": workload,
                "n": figure.n if figure else 0,
                "overhead %": 100 * figure.value if figure else None,
                "low": 100 * figure.extra["slowdown_low"] if figure else None,
                "high": 100 * figure.extra["slowdown_high"] if figure else None,
                "fetched on demand MB": median_or_none(demanded_mb),
                "fetched behind MB": median_or_none(background_mb),
                "longest wait ms": max(longest_waits_ms, default=None),
                "results equal": f"{int((digests == 1).sum())} of {len(digests)}",
            }
        )
    return lines


def moves(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists work that continued in another run directory after its host had died."""
    rows = matching(frame, case="elsewhere")
    lines: list[dict[str, object]] = []
    for how, group in matching(rows, what="restore").groupby("how", sort=True):
        # Two windows: the undisturbed work and the work that continued. Round 0 is Rekindle's guest, 1 libvirt's.
        windows = matching(rows, what="window", round=0 if how == "elsewhere" else 1)
        lines.append(
            {
                "guest of": "libvirt" if how == "libvirt" else "Rekindle",
                "work lost ms": median(milliseconds(pick(group, "lost_us"))),
                "restored in ms": median(milliseconds(pick(group, "restore_us"))),
                "results": len(windows),
                "equal": "yes" if windows["digest"].nunique() == 1 and len(windows) == 2 else "no",
            }
        )
    return lines


def steps(frame: pd.DataFrame) -> dict[tuple[str, str], dict[str, float]]:
    """Returns the medians of each step for figure 4 in ms, by (what was restored, way)."""
    medians_by_way: dict[tuple[str, str], dict[str, float]] = {}
    restores = frame[(frame["what"] == "restore") & frame["case"].isin(("restore", "prepared", "stores"))]
    for (case, mib, store, how), group in restores.groupby(["case", "memory_mib", "store", "how"], sort=True):
        if case == "prepared" and how != "prepared":
            continue
        durations_ms: dict[str, list[float]] = {}
        for text in group["steps"].dropna():
            for step in json.loads(text):
                if step.get("phase") != "settle":
                    durations_ms.setdefault(step["step"], []).append(step["us"] / 1e3)
        whole_ms = median(milliseconds(pick(group, "restore_us")))
        medians = {name: median(values) for name, values in durations_ms.items()}
        medians[REST] = max(0.0, whole_ms - sum(medians.values()))
        label = size(int(mib)) if case == "restore" else f"{size(int(mib))}, {store}"
        medians_by_way[label, str(how)] = medians
    in_order = sorted(medians_by_way, key=lambda key: (HOWS.index(key[1]), key[0]))
    return {key: medians_by_way[key] for key in in_order}
