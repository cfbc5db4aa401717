"""Computes the figures and tables of libvirt domains from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each replaced guest and each checkpoint; `rows.Row` documents its columns, `rows.FIRST` the ways
(column `how`).
"""

import json

import pandas as pd

from rekindle_bench.report import Bar, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, pick, seconds
from rekindle_lab.guests import size
from rekindle_lab.stats import median, p95

from .rows import (
    AGAIN,
    ATTACHED,
    FIRST,
    MANAGEDSAVE,
    OVERLAYS,
    OWN,
    RAM_ONLY,
    REPLACED,
    REPLACED_DOMAIN,
    RESTORED_DOMAIN,
    UNTOUCHED,
)

HEADLINE_MIB = 2048
"""RAM of the domains whose replacement is a figure."""
PAUSE_MIB = 512
"""RAM of the guests whose pause is a figure: the size with the most checkpoints."""
REPLACEMENTS = ("first", "again", "managedsave", "away")
"""Cases that replace QEMUs."""


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _replacements(frame, findings)
    _daemon_away(frame, findings)
    _pauses(frame, findings)
    _losses(frame, findings)
    _overlays(frame, findings)
    _restored(frame, findings)
    _works(frame, findings)
    return findings


def _replacements(frame: pd.DataFrame, findings: Findings) -> None:
    """Computes the guest-stopped times of replacements, and compares service gaps with libvirt's own way."""
    of_size = matching(frame, memory_mib=HEADLINE_MIB)

    def sample_ms(case: str, how: str, column: str = "stopped_us") -> Sample:
        values_us = pick(of_size, column, case=case, how=how)
        return Sample(f"{how}, {size(HEADLINE_MIB)}", milliseconds(values_us))

    firsts = sample_ms("first", FIRST)
    if firsts.values:
        findings.add("libvirt_replace_stopped", firsts.values, "ms", Bar(20.0))
    else:
        findings.report_missing("libvirt_replace_stopped")
    findings.add_ratio(
        "libvirt_replace_again",
        Bar(1.2),
        ours=sample_ms("again", AGAIN),
        peer=sample_ms("again", OWN),
        with_peer=False,
    )
    findings.add_ratio(
        "libvirt_vs_managedsave",
        Bar(0.05),
        ours=sample_ms("managedsave", FIRST, "gap_us"),
        peer=sample_ms("managedsave", MANAGEDSAVE, "gap_us"),
    )


def commands(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row for each command of case `away`: all rows of one command have the same absences."""
    return matching(frame, case="away").drop_duplicates(["memory_mib", "guests", "round"])


def _daemon_away(frame: pd.DataFrame, findings: Findings) -> None:
    """Computes how long a client of libvirt gets no answer, and for comparison how long Rekindle reports."""
    rows = commands(frame)
    away_s = seconds(pick(rows, "away_us"))
    if not away_s:
        findings.report_missing("libvirt_daemon_away")
        return
    reported_s = seconds(pick(rows, "reported_away_us"))
    extra = {
        "domains": median(pick(rows, "guests")),
        "absences": median(pick(rows, "absences")),
        "longest_absence_s": median(seconds(pick(rows, "longest_away_us"))),
    }
    extra |= {"reported_s": median(reported_s)} if reported_s else {}
    findings.add("libvirt_daemon_away", away_s, "s", Bar(3.0), extra=extra)


def _pauses(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the pauses of checkpoints of domains with those of a VM of Rekindle's."""

    def pauses_ms(how: str) -> Sample:
        values_us = pick(frame, "stopped_us", case="pause", how=how, memory_mib=PAUSE_MIB)
        return Sample(f"{how}, {size(PAUSE_MIB)}", milliseconds(values_us))

    for name, how, bar in (("libvirt_pause", ATTACHED, Bar(1.5)), ("libvirt_pause_replaced", REPLACED, Bar(1.1))):
        findings.add_ratio(name, bar, ours=pauses_ms(how), peer=pauses_ms(OWN), with_peer=False)


def _losses(frame: pd.DataFrame, findings: Findings) -> None:
    """Counts the requests and sessions that were lost over all replacements with clients."""
    rows = matching(frame, case="losses")
    if rows.empty:
        findings.report_missing("libvirt_losses")
        return
    failed, sessions = sum(pick(rows, "failed")), max(pick(rows, "lost_sessions"))
    extra = {
        "replacements": len(rows),
        "versions": len(set(rows["to_version"])),
        "requests": sum(pick(rows, "answered")) + failed,
        "lost_requests": failed,
        "sessions": max(pick(rows, "sessions")),
        "lost_sessions": sessions,
    }
    findings.add("libvirt_losses", [failed + sessions], "", Bar(0.0), extra=extra)


def _overlays(frame: pd.DataFrame, findings: Findings) -> None:
    """Computes what overlays cost in the pause and in the guest's writes, and counts wrong blocks."""
    disks_ms = milliseconds(pick(frame, "disks_us", case="overlays", how=OVERLAYS))
    if disks_ms:
        findings.add("overlay_pause", disks_ms, "ms", Bar(3.0))
    else:
        findings.report_missing("overlay_pause")

    def writes(how: str) -> Sample:
        return Sample(how, pick(frame, "writes_per_s", case="overlays", how=how))

    findings.add_ratio(
        "overlay_write_cost",
        Bar(0.85, ">="),
        ours=writes(OVERLAYS),
        peer=writes(RAM_ONLY),
        unit="writes/s",
        with_peer=False,
    )
    rows = matching(frame, case="epochs")
    if rows.empty:
        findings.report_missing("overlay_wrong")
        return
    extra = {"checkpoints": sum(pick(rows, "number")), "verified_passes": sum(pick(rows, "passes"))}
    findings.add("overlay_wrong", [sum(pick(rows, "wrong"))], "", Bar(0.0), extra=extra)


def _restored(frame: pd.DataFrame, findings: Findings) -> None:
    """Computes the time from the command until the guest runs and libvirt lists it."""
    rows = matching(frame, case="restored", memory_mib=HEADLINE_MIB)
    command_s = seconds(pick(rows, "command_us"))
    if not command_s:
        findings.report_missing("libvirt_restore")
        return
    findings.add("libvirt_restore", command_s, "s", Bar(1.5), extra={"failed": len(matching(rows, worked=False))})


def restores(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the restores into libvirt by size."""
    return [
        {
            "domain": size(int(mib)),
            "n": len(rows),
            "command s": median_or_none(seconds(pick(rows, "command_us"))),
            "failed": len(matching(rows, worked=False)),
        }
        for mib, rows in matching(frame, case="restored").groupby("memory_mib", sort=True)
    ]


def disks(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists pauses and the guest's writes without and with overlays."""
    lines: list[dict[str, object]] = []
    for how, rows in matching(frame, case="overlays").groupby("how", sort=False):
        stopped_ms, disks_ms = milliseconds(pick(rows, "stopped_us")), milliseconds(pick(rows, "disks_us"))
        writes = pick(rows, "writes_per_s")
        lines.append(
            {
                "how": how,
                "writes per s": median_or_none(writes),
                "n": len(writes),
                "pause ms": median_or_none(stopped_ms),
                "of it for the disks ms": median_or_none(disks_ms),
                "pauses": len(stopped_ms),
            }
        )
    return lines


def _works(frame: pd.DataFrame, findings: Findings) -> None:
    """Counts operations on replaced and restored domains that always work, of those that work on untouched ones."""
    tried = operations(frame)
    sound = [line for line in tried if line.get(UNTOUCHED) == "works"]
    if not sound:
        findings.report_missing("libvirt_works_after")
        return
    works = [float(line[how] == "works") for line in sound for how in (REPLACED_DOMAIN, RESTORED_DOMAIN) if how in line]
    extra = {"operations": len(tried), "fail_without_a_replacement": len(tried) - len(sound)}
    findings.add("libvirt_works_after", [sum(works) / len(works)], "", Bar(1.0, ">="), extra=extra)


def operations(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists libvirt's operations: whether each works in every round on each kind of domain, or else why not."""
    lines: list[dict[str, object]] = []
    for name, rows in matching(frame, case="works").groupby("operation", sort=False):
        line: dict[str, object] = {"operation": name}
        for how in (UNTOUCHED, REPLACED_DOMAIN, RESTORED_DOMAIN):
            if matching(rows, how=how).empty:
                continue
            failures = [failure or "" for failure in matching(rows, how=how, worked=False)["failure"]]
            line[how] = failures[0] if failures else "works"
        lines.append(line)
    return lines


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists each case, size and way of replacing QEMUs: guest-stopped time and service gap in ms."""
    lines: list[dict[str, object]] = []
    for case in REPLACEMENTS:
        for (mib, guests, how), rows in matching(frame, case=case).groupby(["memory_mib", "guests", "how"], sort=True):
            stopped_ms, gap_ms = milliseconds(pick(rows, "stopped_us")), milliseconds(pick(rows, "gap_us"))
            lines.append(
                {
                    "case": case,
                    "guests": size(int(mib)) if guests == 1 else f"{guests} x {size(int(mib))}",
                    "how": how,
                    "n": len(rows),
                    "stopped ms": median_or_none(stopped_ms),
                    "stopped p95": p95(stopped_ms) if stopped_ms else None,
                    "gap ms": median_or_none(gap_ms),
                    "gap p95": p95(gap_ms) if gap_ms else None,
                    "command s": median_or_none(seconds(pick(rows, "command_us"))),
                    "written MB/s": median_or_none(pick(rows, "written_mb")),
                }
            )
    return lines


def absences(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians of the absences of libvirt, of first and of later replacements."""
    return [
        {
            "domains": f"{guests} x {size(int(mib))}",
            "how": how,
            "n": len(rows),
            "away s": median_or_none(seconds(pick(rows, "away_us"))),
            "absences": median_or_none(pick(rows, "absences")),
            "longest s": median_or_none(seconds(pick(rows, "longest_away_us"))),
            "reported s": median_or_none(seconds(pick(rows, "reported_away_us"))),
            "command s": median_or_none(seconds(pick(rows, "command_us"))),
        }
        for (mib, guests, how), rows in commands(frame).groupby(["memory_mib", "guests", "how"], sort=True)
    ]


def pauses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the pauses of checkpoints by size and guest."""
    lines: list[dict[str, object]] = []
    for (mib, how), rows in matching(frame, case="pause").groupby(["memory_mib", "how"], sort=True):
        stopped_ms = milliseconds(pick(rows, "stopped_us"))
        lines.append(
            {
                "guest": size(int(mib)),
                "how": how,
                "n": len(stopped_ms),
                "pause ms": median_or_none(stopped_ms),
                "p95": p95(stopped_ms) if stopped_ms else None,
                "dirty MiB": _median_mib(rows, "dirty_bytes"),
                "copied in the pause MiB": _median_mib(rows, "copied_stopped_bytes"),
            }
        )
    return lines


def _median_mib(rows: pd.DataFrame, column: str) -> float | None:
    return median_or_none([value / 2**20 for value in pick(rows, column)])


def stopped_steps_ms(frame: pd.DataFrame) -> dict[tuple[str, int, str], dict[str, list[float]]]:
    """Returns the durations of the steps of a replacement, in ms, each as far as the guest is stopped during it.

    By case, MiB of RAM and way, then by step.
    """
    steps_ms: dict[tuple[str, int, str], dict[str, list[float]]] = {}
    rows = frame[frame["case"].isin(("first", "again"))]
    for (case, mib, how), group in rows.groupby(["case", "memory_mib", "how"], sort=True):
        durations_ms = steps_ms.setdefault((case, int(mib), how), {})
        for _, row in group.iterrows():
            for step in json.loads(row["steps"]):
                begin_us, end_us = step["start_host_us"], step["start_host_us"] + step["us"]
                stopped_us = min(end_us, row["resume_host_us"]) - max(begin_us, row["stop_host_us"])
                if stopped_us > 0:
                    durations_ms.setdefault(step["step"], []).append(stopped_us / 1e3)
    return steps_ms


def stops(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians of the steps of a replacement, in ms, as far as the guest is stopped."""
    return [
        {"case": case, "guest": size(mib), "how": how}
        | {f"{name} ms": median(values) for name, values in durations_ms.items()}
        for (case, mib, how), durations_ms in stopped_steps_ms(frame).items()
    ]
