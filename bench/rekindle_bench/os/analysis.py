"""Computes the figures and tables of OS reboots from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each reboot; `rows.Row` documents its columns. `how` is the way to reboot, such as `cold`,
`kexec` or `phase-services` (resume from a boot snapshot, taken when the services were up: the *late phase*).
"""

from collections.abc import Iterator

import pandas as pd

from rekindle_bench.report import Bar, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, numbers, pick, seconds
from rekindle_lab.stats import median, median_interval, p95

from .rows import FROZEN, PEERS, WAYS

STAGES = {
    "shut down": ("silent_host_us", "ended_host_us"),
    "new QEMU": ("ended_host_us", "running_host_us"),
    "firmware": ("running_host_us", "loader_host_us"),
    "loader": ("loader_host_us", "kernel_host_us"),
    "kernel": ("kernel_host_us", "user_host_us"),
    "user space": ("user_host_us", "served_host_us"),
}
"""Columns that bound the stages of a boot in which all stages are observed, in order."""
JUMP = "shut down and jump"
"""With kexec: from the last answer to the start of the new kernel. The jump alone cannot be observed."""
REST = "kernel, user space"
"""Stages that cannot be separated: on micro, and after a boot snapshot was resumed."""


def between(rows: pd.DataFrame, begin: str, end: str) -> list[float]:
    """Returns the seconds from one column to another, for the rows that have both."""
    return seconds(numbers(rows[end] - rows[begin]))


def recovered(rows: pd.DataFrame) -> list[float]:
    """Returns what share of its leak each reboot recovered; 1 is all.

    All memory above the level before the leak counts as not recovered.
    """
    not_recovered_bytes = (rows["slab_after_kib"] - rows["slab_before_kib"]).clip(lower=0) * 1024
    return [1.0 - share for share in numbers(not_recovered_bytes / rows["leaked_bytes"])]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _kexec(frame, findings)
    _late_phase(frame, findings)
    _restore(frame, findings)
    _leak(frame, findings)
    return findings


def _boots(frame: pd.DataFrame, guest: str, how: str) -> pd.DataFrame:
    return matching(frame, case="reboot", guest=guest, how=how)


def _downtimes(label: str, reboots: pd.DataFrame) -> Sample:
    """Returns the client's longest times without an answer, in s."""
    return Sample(label, seconds(pick(reboots, "gap_us")))


def _kexec(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares kexec with cold. `extra`: what kexec skips (all that precedes the kernel), and the rest of both."""
    cold, kexec = _boots(frame, "debian", "cold"), _boots(frame, "debian", "kexec")
    extra = {}
    skipped_s = between(cold, "ended_host_us", "kernel_host_us")
    if skipped_s and len(kexec):
        extra["cold_before_kernel_s"] = median(skipped_s)
        extra["cold_before_kernel_share"] = median(skipped_s) / median(seconds(pick(cold, "gap_us")))
        extra["cold_from_kernel_s"] = median(between(cold, "kernel_host_us", "served_host_us"))
        extra["kexec_from_kernel_s"] = median(between(kexec, "kernel_host_us", "served_host_us"))
    findings.add_ratio(
        "kexec_vs_cold",
        Bar(0.23),
        ours=_downtimes("kexec, debian", kexec),
        peer=_downtimes("cold, debian", cold),
        with_peer=False,
        unit="s",
        extra=extra,
    )


def _late_phase(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the late phase with cold: with a clean shutdown of the previous guest (default), and with a freeze."""
    cold = _boots(frame, "immutable", "cold")
    for how, name, label in (
        ("phase-services", "phase_late_vs_cold", "late phase, immutable"),
        (f"phase-services{FROZEN}", "phase_late_frozen_vs_cold", "late phase, file systems frozen, immutable"),
    ):
        late = _boots(frame, "immutable", how)
        late_s, cold_s = (between(reboots, "ended_host_us", "served_host_us") for reboots in (late, cold))
        findings.add_ratio(
            name,
            Bar(0.064),
            ours=_downtimes(label, late),
            peer=_downtimes("cold, immutable", cold),
            with_peer=False,
            unit="s",
            extra={"ratio_without_shutting_down": median(late_s) / median(cold_s)} if late_s and cold_s else {},
        )


def _restore(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the time to load a boot snapshot."""
    for guest, name in (("immutable", "phase_restore_ms"), ("micro", "phase_restore_ms_micro")):
        rows = _boots(frame, guest, "phase-services")
        load_ms = milliseconds(pick(rows, "load_us", memory_mib=512))
        if not load_ms:
            findings.report_missing(name, f"{guest}, 512M")
            continue
        low, high = median_interval(load_ms)
        after_end_ms = median(between(rows, "ended_host_us", "running_host_us")) * 1e3
        extra = {"low95": low, "high95": high, "after_the_former_guests_end": after_end_ms}
        findings.add(name, load_ms, "ms", Bar(100.0), extra=extra)


def _leak(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the share of a leak that the worst way recovers. `extra`: the share of each way."""
    shares = {
        f"{guest}_{how}": recovered(rows)
        for (guest, how), rows in matching(frame, case="leak").groupby(["guest", "how"])
    }
    shares = {way: values for way, values in shares.items() if values}
    if not shares:
        findings.report_missing("leak_recovered")
        return
    findings.add(
        "leak_recovered",
        min(shares.values(), key=median),
        "",
        Bar(1.0, ">="),
        n=min(len(values) for values in shares.values()),
        extra={way: median(values) for way, values in shares.items()},
    )


def _by_way(frame: pd.DataFrame, case: str, hows: tuple[str, ...]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yields guest, way and rows of a case, in the order of the guests in the file and of `hows`."""
    of_case = matching(frame, case=case)
    for guest in of_case["guest"].unique():
        for how in hows:
            rows = matching(of_case, guest=guest, how=how)
            if len(rows):
                yield guest, how, rows


def downtimes(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the downtime of each way, compared with cold."""
    lines = []
    for guest, how, rows in _by_way(frame, "reboot", WAYS):
        downtime_s, cold_s = seconds(pick(rows, "gap_us")), seconds(pick(_boots(frame, guest, "cold"), "gap_us"))
        low, high = median_interval(downtime_s)
        lines.append(
            {
                "guest": guest,
                "reboot": how,
                "n": len(rows),
                "downtime": median(downtime_s),
                "low": low,
                "high": high,
                "p95": p95(downtime_s),
                "/ cold": median(downtime_s) / median(cold_s) if cold_s else None,
                "first request ms": median(milliseconds(pick(rows, "first_us"))),
                "load ms": median_or_none(milliseconds(pick(rows, "load_us"))),
            }
        )
    return lines


def stages_of(rows: pd.DataFrame, how: str) -> dict[str, float]:
    """Returns the medians of the stages of one way in s, in order, as far as they can be observed."""
    if how == "kexec":
        bounds = {
            JUMP: ("silent_host_us", "kernel_host_us"),
            **{name: STAGES[name] for name in ("kernel", "user space")},
        }
    elif how.startswith("phase-"):
        bounds = {name: STAGES[name] for name in ("shut down", "new QEMU")} | {
            REST: ("running_host_us", "served_host_us")
        }
    elif rows["user_host_us"].notna().any():
        bounds = STAGES
    else:
        bounds = {name: STAGES[name] for name in ("shut down", "new QEMU", "firmware", "loader")}
        bounds[REST] = ("kernel_host_us", "served_host_us")
    durations_s = {name: between(rows, begin, end) for name, (begin, end) in bounds.items()}
    return {name: median(values) for name, values in durations_s.items() if values}


def stages(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the stages of each way."""
    lines = []
    for guest, how, rows in _by_way(frame, "reboot", WAYS):
        medians_s = stages_of(rows, how)
        by_stage = {name: medians_s.get(name) for name in (JUMP, *STAGES, REST)}
        lines.append({"guest": guest, "reboot": how, **by_stage, "n": len(rows)})
    return lines


def peers(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists Rekindle's ways and peers, from the end of the previous guest on: a peer does not shut it down."""
    lines = []
    for guest, how, rows in _by_way(frame, "peers", (*WAYS, *PEERS)):
        answered_s = between(rows, "ended_host_us", "served_host_us")
        low, high = median_interval(answered_s)
        lines.append(
            {
                "guest": guest,
                "how": how,
                "running": median_or_none(between(rows, "ended_host_us", "running_host_us")),
                "first answer": median(answered_s),
                "low": low,
                "high": high,
                "load ms": median_or_none(milliseconds(pick(rows, "load_us"))),
                "first request ms": median(milliseconds(pick(rows, "first_us"))),
                "n": len(rows),
            }
        )
    return lines


def leaks(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the memory figures that the guests report, in MiB, before the leak, after it, and after the reboot."""
    lines = []
    for guest, how, rows in _by_way(frame, "leak", WAYS):
        line: dict[str, object] = {"guest": guest, "reboot": how}
        line["leaked"] = median(pick(rows, "leaked_bytes")) / (1 << 20)
        for what in ("slab", "available"):
            for when in ("before", "leaked", "after"):
                line[f"{what} {when}"] = median(pick(rows, f"{what}_{when}_kib")) / 1024
        shares = recovered(rows)
        lines.append(line | {"recovered": median(shares), "least": min(shares), "n": len(rows)})
    return lines
