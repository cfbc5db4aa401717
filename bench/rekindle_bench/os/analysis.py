"""Computes the figures of OS reboots from raw rows alone, so that a file can be analysed again."""

import pandas as pd

from rekindle_bench.report import Bar, Figure, Findings
from rekindle_bench.rows import milliseconds, pick
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


def seconds(values_us: list[float]) -> list[float]:
    """Converts from microseconds."""
    return [value / 1e6 for value in values_us]


def gaps(frame: pd.DataFrame, guest: str, how: str) -> list[float]:
    """Returns downtimes in s."""
    return seconds(pick(frame, "gap_us", case="reboot", guest=guest, how=how))


def between(rows: pd.DataFrame, begin: str, end: str) -> list[float]:
    """Returns the seconds from one column to another, for the rows that have both."""
    return seconds([float(value) for value in (rows[end] - rows[begin]).dropna()])


def recovered(rows: pd.DataFrame) -> list[float]:
    """Returns what share of its leak each reboot recovered; 1 is all.

    All memory above the level before the leak counts as not recovered.
    """
    left = (rows["slab_after_kib"] - rows["slab_before_kib"]).clip(lower=0) * 1024 / rows["leaked_bytes"]
    return [1.0 - float(value) for value in left.dropna()]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _kexec(frame, findings)
    _late(frame, findings)
    _restore(frame, findings)
    _leak(frame, findings)
    return findings


def _boots(frame: pd.DataFrame, guest: str, how: str) -> pd.DataFrame:
    return frame[(frame["case"] == "reboot") & (frame["guest"] == guest) & (frame["how"] == how)]


def _kexec(frame: pd.DataFrame, findings: Findings) -> None:
    cold, kexec = _boots(frame, "debian", "cold"), _boots(frame, "debian", "kexec")
    extra = {}
    skipped = between(cold, "ended_host_us", "kernel_host_us")
    if skipped and len(kexec):
        extra["cold_before_kernel_s"] = median(skipped)
        extra["cold_before_kernel_share"] = median(skipped) / median(seconds(pick(cold, "gap_us")))
        extra["cold_from_kernel_s"] = median(between(cold, "kernel_host_us", "served_host_us"))
        extra["kexec_from_kernel_s"] = median(between(kexec, "kernel_host_us", "served_host_us"))
    words = ("kexec, debian", "cold, debian")
    samples = (gaps(frame, "debian", "kexec"), gaps(frame, "debian", "cold"))
    findings.ratio("kexec_vs_cold", Bar(0.23), *samples, *words, of_peer=False, unit="s", extra=extra)


def _late(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the late phase with cold: with a clean shutdown of the previous guest (default), and with a freeze."""
    for how, name, what in (
        ("phase-services", "phase_late_vs_cold", "late phase, immutable"),
        (f"phase-services{FROZEN}", "phase_late_frozen_vs_cold", "late phase, file systems frozen, immutable"),
    ):
        late, cold = _boots(frame, "immutable", how), _boots(frame, "immutable", "cold")
        extra = {}
        samples = [between(rows, "ended_host_us", "served_host_us") for rows in (late, cold)]
        if all(samples):
            extra["ratio_without_shutting_down"] = median(samples[0]) / median(samples[1])
        downtimes_s = (gaps(frame, "immutable", how), gaps(frame, "immutable", "cold"))
        words = (what, "cold, immutable")
        findings.ratio(name, Bar(0.064), *downtimes_s, *words, of_peer=False, unit="s", extra=extra)


def _restore(frame: pd.DataFrame, findings: Findings) -> None:
    for guest, name in (("immutable", "phase_restore_ms"), ("micro", "phase_restore_ms_micro")):
        rows = _boots(frame, guest, "phase-services")
        values = milliseconds(pick(rows, "load_us", memory_mib=512))
        if not values:
            findings.report_missing(name, f"{guest}, 512M")
            continue
        low, high = median_interval(values)
        extra = {"low95": low, "high95": high}
        extra["after_the_former_guests_end"] = median(between(rows, "ended_host_us", "running_host_us")) * 1e3
        findings.add_sample(name, "ms", values, Bar(100.0), extra=extra)


def _leak(frame: pd.DataFrame, findings: Findings) -> None:
    ways = [(key, recovered(rows)) for key, rows in frame[frame["case"] == "leak"].groupby(["guest", "how"])]
    ways = [(key, values) for key, values in ways if values]
    if not ways:
        findings.report_missing("leak_recovered")
        return
    (_, least) = min(ways, key=lambda way: median(way[1]))
    extra = {f"{guest}_{how}": median(values) for (guest, how), values in ways}
    n, bar = min(len(values) for _, values in ways), Bar(1.0, ">=")
    findings.add(Figure("leak_recovered", median(least), "", n, p95(least), bar, findings.raw, extra=extra))


def _of(frame: pd.DataFrame, case: str, hows: tuple[str, ...]) -> list[tuple[str, str, pd.DataFrame]]:
    """Returns the rows of a case by guest and way, in order."""
    rows = frame[frame["case"] == case]
    guests = list(dict.fromkeys(rows["guest"]))
    found = [(guest, how, rows[(rows["guest"] == guest) & (rows["how"] == how)]) for guest in guests for how in hows]
    return [(guest, how, of) for guest, how, of in found if len(of)]


def downtimes(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the downtime of each way, compared with cold."""
    lines = []
    for guest, how, of in _of(frame, "reboot", WAYS):
        gap, cold = seconds(pick(of, "gap_us")), gaps(frame, guest, "cold")
        low, high = median_interval(gap)
        line: dict[str, object] = {"guest": guest, "reboot": how, "n": len(of), "downtime": median(gap)}
        line |= {"low": low, "high": high, "p95": p95(gap), "/ cold": median(gap) / median(cold) if cold else None}
        line |= {"first request ms": median(milliseconds(pick(of, "first_us")))}
        loads = milliseconds(pick(of, "load_us"))
        lines.append(line | {"load ms": median(loads) if loads else None})
    return lines


def stages_of(rows: pd.DataFrame, how: str) -> dict[str, float]:
    """Returns the medians of the stages of one way in s, in order."""
    spans = dict(STAGES)
    if how == "kexec":
        spans = {JUMP: ("silent_host_us", "kernel_host_us"), **{key: STAGES[key] for key in ("kernel", "user space")}}
    elif how.startswith("phase-"):
        spans = {key: STAGES[key] for key in ("shut down", "new QEMU")} | {REST: ("running_host_us", "served_host_us")}
    elif not len(rows["user_host_us"].dropna()):
        spans = {key: STAGES[key] for key in ("shut down", "new QEMU", "firmware", "loader")}
        spans[REST] = ("kernel_host_us", "served_host_us")
    known = {name: between(rows, *span) for name, span in spans.items()}
    return {name: median(values) for name, values in known.items() if values}


def stages(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the stages of each way."""
    columns = [JUMP, *STAGES, REST]
    lines = []
    for guest, how, of in _of(frame, "reboot", WAYS):
        known = stages_of(of, how)
        line: dict[str, object] = {"guest": guest, "reboot": how}
        lines.append(line | {name: known.get(name) for name in columns} | {"n": len(of)})
    return lines


def peers(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists Rekindle's ways and peers, from the end of the previous guest on: a peer does not shut it down."""
    lines = []
    for guest, how, of in _of(frame, "peers", (*WAYS, *PEERS)):
        running = between(of, "ended_host_us", "running_host_us")
        line: dict[str, object] = {"guest": guest, "how": how, "running": median(running) if running else None}
        served = between(of, "ended_host_us", "served_host_us")
        low, high = median_interval(served)
        line |= {"first answer": median(served), "low": low, "high": high}
        loads = milliseconds(pick(of, "load_us"))
        line |= {"load ms": median(loads) if loads else None}
        lines.append(line | {"first request ms": median(milliseconds(pick(of, "first_us"))), "n": len(of)})
    return lines


def leaks(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the memory figures that the guests report."""
    lines = []
    for guest, how, of in _of(frame, "leak", WAYS):
        line: dict[str, object] = {
            "guest": guest,
            "reboot": how,
            "leaked": median(pick(of, "leaked_bytes")) / (1 << 20),
        }
        for what in ("slab", "available"):
            for at in ("before", "leaked", "after"):
                line[f"{what} {at}"] = median(pick(of, f"{what}_{at}_kib")) / 1024
        lines.append(line | {"recovered": median(recovered(of)), "least": min(recovered(of)), "n": len(of)})
    return lines
