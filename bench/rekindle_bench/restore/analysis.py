"""Computes the figures of restores from raw rows alone, so that a file can be analysed again."""

import json

import pandas as pd

from rekindle_bench.report import Bar, Figure, Findings
from rekindle_bench.rows import milliseconds, pick
from rekindle_lab.guests import size
from rekindle_lab.stats import compare, median, p95, ratio_interval

from .rows import HOWS

SMALL_MIB, LARGE_MIB = 512, 8192


def restores(frame: pd.DataFrame, **where: float | str) -> list[float]:
    """Returns the times from the command until the guest runs, in ms."""
    return milliseconds(pick(frame[frame["what"] == "restore"], "restore_us", **where))


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    small = restores(frame, case="restore", memory_mib=SMALL_MIB, how="lazy")
    large = restores(frame, case="restore", memory_mib=LARGE_MIB, how="lazy")
    peer = restores(frame, case="restore", memory_mib=SMALL_MIB, how="incoming")
    if small:
        of = compare(small, peer) if peer else None
        findings.add(
            Figure(
                "restore_ms_512m",
                median(small),
                "ms",
                len(small),
                p95(small),
                Bar(100.0),
                raw,
                of,
                "ms",
                "lazy, 512M",
                "-incoming file:, 512M" if of else "",
            )
        )
    else:
        findings.report_missing("restore_ms_512m")
    findings.ratio(
        "restore_8g_vs_512m",
        Bar(1.2),
        large,
        small,
        f"lazy, {size(LARGE_MIB)}",
        f"lazy, {size(SMALL_MIB)}",
        of_peer=False,
    )
    _prepared(frame, findings)
    for workload, name in (("compile", "slowdown_after_restore"), ("transcode", "slowdown_after_restore_transcoding")):
        _slowdown(frame, findings, workload, name)
    return findings


def _prepared(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the time of a restore into a prepared QEMU, and the memory that a prepared QEMU uses while it waits."""
    into = restores(frame, case="prepared", how="prepared")
    fresh = restores(frame, case="prepared", how="lazy")
    resident = [value / 1024 for value in pick(frame, "resident_kib", case="prepared", how="prepared")]
    if not into:
        findings.report_missing("restore_prepared_ms")
        return
    of = compare(into, fresh) if fresh else None
    findings.add(
        Figure(
            "restore_prepared_ms",
            median(into),
            "ms",
            len(into),
            p95(into),
            Bar(20.0),
            findings.raw,
            of,
            "ms",
            "prepared",
            "not prepared" if of else "",
            of_peer=False,
        )
    )
    if resident:
        n = len(resident)
        bar = Bar(60.0)
        findings.add(Figure("restore_prepared_mb", median(resident), "MB", n, p95(resident), bar, findings.raw))


def _slowdown(frame: pd.DataFrame, findings: Findings, workload: str, name: str) -> None:
    """Compares the rest of a piece of work after a restore with the undisturbed rest, by the ratio of each pair."""
    rows = frame[(frame["case"] == "after") & (frame["workload"] == workload) & (frame["what"] == "window")]
    by_round = rows.pivot_table(index="round", columns="how", values="rest_us") if len(rows) else pd.DataFrame()
    if not {"lazy", "undisturbed"} <= set(by_round.columns) or len(by_round.dropna()) < 2:
        findings.report_missing(name)
        return
    pairs = by_round.dropna()
    ours, theirs = list(pairs["lazy"] / 1e6), list(pairs["undisturbed"] / 1e6)
    of = compare(ours, theirs)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high = ratio_interval(ratios, [1.0] * len(ratios))
    findings.add(
        Figure(
            name,
            median(ratios) - 1,
            "",
            len(ratios),
            p95(ratios) - 1,
            Bar(0.04),
            findings.raw,
            of,
            "s",
            f"{workload}, restored",
            "undisturbed",
            of_peer=False,
            extra={"slowdown_low": low - 1, "slowdown_high": high - 1},
        )
    )


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists each case, size, store and way, with the peer: the paper's figure 4."""
    rows = frame[frame["what"] == "restore"]
    lines: list[dict[str, object]] = []
    for (case, mib, store, how), group in rows.groupby(["case", "memory_mib", "store", "how"], sort=True):
        values = milliseconds(pick(group, "restore_us"))
        fill = [value / 1e6 for value in pick(group, "fill_us")]
        resident = [value / 1024 for value in pick(group, "resident_kib")]
        lines.append(
            {
                "case": case,
                "guest": size(int(mib)),
                "store": store,
                "how": how,
                "n": len(values),
                "running after ms": median(values),
                "p95": p95(values),
                "all memory after s": median(fill) if fill else None,
                "waiting MB": median(resident) if resident else None,
            }
        )
    return lines


def table_2(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's table II: overhead of the second half of the work, and memory fetched."""
    rows = frame[frame["case"] == "after"]
    lines: list[dict[str, object]] = []
    for workload, group in rows.groupby("workload", sort=True):
        findings = Findings("")
        _slowdown(group, findings, str(workload), str(workload))
        demanded = [value * 4096 / 1e6 for value in pick(group, "demanded_pages")]
        behind = [value * 4096 / 1e6 for value in pick(group, "filled_pages")]
        worst = milliseconds(pick(group, "worst_us"))
        figure = findings.figures[0] if findings.figures else None
        digests = group[group["what"] == "window"].groupby("round")["digest"].nunique()
        lines.append(
            {
                "workload": workload,
                "n": figure.n if figure else 0,
                "overhead %": 100 * figure.value if figure else None,
                "low": 100 * figure.extra["slowdown_low"] if figure else None,
                "high": 100 * figure.extra["slowdown_high"] if figure else None,
                "fetched on demand MB": median(demanded) if demanded else None,
                "fetched behind MB": median(behind) if behind else None,
                "longest wait ms": max(worst) if worst else None,
                "results equal": f"{int((digests == 1).sum())} of {len(digests)}",
            }
        )
    return lines


def moves(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists work that continued in another run directory after its host had died."""
    rows = frame[frame["case"] == "elsewhere"]
    lines: list[dict[str, object]] = []
    for how, group in rows[rows["what"] == "restore"].groupby("how", sort=True):
        windows = rows[(rows["what"] == "window") & rows["round"].isin([0 if how == "elsewhere" else 1])]
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
    out: dict[tuple[str, str], dict[str, float]] = {}
    rows = frame[(frame["what"] == "restore") & frame["case"].isin(("restore", "prepared", "stores"))]
    for (case, mib, store, how), group in rows.groupby(["case", "memory_mib", "store", "how"], sort=True):
        if case == "prepared" and how != "prepared":
            continue
        parts: dict[str, list[float]] = {}
        for text in group["steps"].dropna():
            for step in json.loads(text):
                if step.get("phase") != "settle":
                    parts.setdefault(step["step"], []).append(step["us"] / 1e3)
        whole = median(milliseconds(pick(group, "restore_us")))
        medians = {name: median(values) for name, values in parts.items()}
        medians["the rest"] = max(0.0, whole - sum(medians.values()))
        label = size(int(mib)) if case == "restore" else f"{size(int(mib))}, {store}"
        out[(label, str(how))] = medians
    return dict(sorted(out.items(), key=lambda item: (HOWS.index(item[0][1]), item[0][0])))
