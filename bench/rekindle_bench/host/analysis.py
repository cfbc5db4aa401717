"""Computes the figures and tables of host reboots from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each guest of each reboot; `rows.Row` documents its columns. `reboots` reduces it to a row for
each reboot. Ways (column `how`): `warm` (guests' RAM stays in place), `saved` (RAM to disk and back), `cold`.
"""

import pandas as pd

from rekindle_bench.report import Bar, Contrast, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, numbers, pick, seconds
from rekindle_lab.guests import size
from rekindle_lab.stats import median

from .plan import SMALL_MIB
from .rows import HOWS

KEYS = ["case", "how", "vms", "memory_mib", "where", "round"]
"""Columns that together identify a reboot."""
STAGES = ("services", "suspend", "down", "firmware", "kernel", "userspace", "resume")
"""The parts of a reboot in their order; the duration of each is in the column with the suffix `_us`."""
LARGE_MIB = 1024
MANY = 4
"""Number of guests for which figures are computed: the largest in the full plan."""


def reboots(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each reboot: the values that its guests share, and these columns in s.

    `downtime_s`: the longest of its guests' downtimes. `before_s`: suspend. `after_s`: resume. `both_s`: their sum.
    """
    shared = frame.drop_duplicates(KEYS).set_index(KEYS)
    return shared.assign(
        downtime_s=frame.groupby(KEYS)["gap_us"].max() / 1e6,
        both_s=(shared["suspend_us"] + shared["resume_us"]) / 1e6,
        before_s=shared["suspend_us"] / 1e6,
        after_s=shared["resume_us"] / 1e6,
    ).reset_index()


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    by_reboot = reboots(frame)
    _suspend_resume(by_reboot, findings)
    _warm_vs_cold(by_reboot, findings)
    _lost_connections(frame, by_reboot, findings)
    _lost_guests(frame, by_reboot, findings)
    return findings


def _suspend_resume(by_reboot: pd.DataFrame, findings: Findings) -> None:
    """Adds the time of suspend and resume together, and how it grows with a guest's RAM."""
    warm = matching(by_reboot, how="warm")
    many_s = pick(warm, "both_s", case="counts", vms=MANY)
    one_large_s = pick(warm, "both_s", case="sizes", memory_mib=LARGE_MIB)
    one_small_s = pick(warm, "both_s", case="sizes", memory_mib=SMALL_MIB)
    if not many_s or not one_large_s or not one_small_s:
        missing = f"{MANY} guests, or one of {size(SMALL_MIB)} and of {size(LARGE_MIB)}"
        findings.report_missing("host_suspend_resume", missing)
        return
    one_large = Sample(f"1 guest, {size(LARGE_MIB)}", one_large_s)
    one_small = Sample(f"1 guest, {size(SMALL_MIB)}", one_small_s)
    findings.add(
        "host_suspend_resume",
        many_s,
        "s",
        Bar(1.0),
        contrast=Contrast.of(one_large, one_small, "s", with_peer=False),
        ratio_bar=Bar(1.1),
        extra={"one_guest_s": median(one_small_s)},
    )


def _warm_vs_cold(by_reboot: pd.DataFrame, findings: Findings) -> None:
    """Compares the downtime of warm and cold reboots. `extra`: the firmware's share of the downtime of a cold one."""
    warm, cold = (matching(by_reboot, case="counts", vms=MANY, how=how) for how in ("warm", "cold"))
    firmware_s = seconds(numbers(cold["firmware_us"]))
    findings.add_ratio(
        "host_warm_vs_cold",
        Bar(0.26),
        ours=Sample(f"warm, {MANY} guests", numbers(warm["downtime_s"])),
        peer=Sample(f"cold, {MANY} guests", numbers(cold["downtime_s"])),
        with_peer=False,
        unit="s",
        extra={"cold_firmware_share": median(firmware_s) / median(list(cold["downtime_s"]))} if firmware_s else {},
    )


def _lost_connections(frame: pd.DataFrame, by_reboot: pd.DataFrame, findings: Findings) -> None:
    lost = pick(frame, "sessions_lost", case="losses", how="warm")
    if not lost:
        findings.report_missing("host_tcp_lost")
        return
    rounds = len(matching(by_reboot, case="losses"))
    extra = {"connections": float(len(lost)), "reboots": float(rounds)}
    findings.add("host_tcp_lost", lost, "", Bar(0.0, "=="), value=sum(lost), n=rounds, extra=extra)


def _lost_guests(frame: pd.DataFrame, by_reboot: pd.DataFrame, findings: Findings) -> None:
    """Counts the guests whose memory was lost in reboots with a fault."""
    guests = matching(frame, case="faults")
    if not len(guests):
        findings.report_missing("host_guests_lost")
        return
    lost = [float(is_lost) for is_lost in guests["outcome"] != "kept"]
    rounds = matching(by_reboot, case="faults")["where"].value_counts()
    extra = {f"reboots_{where}": float(rounds.get(where, 0)) for where in ("direct", "emulated")}
    extra["guests"] = float(len(lost))
    findings.add("host_guests_lost", lost, "", Bar(0.0, "=="), value=sum(lost), n=int(rounds.sum()), extra=extra)


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians in s by case, way, number of guests and size."""
    lines: list[dict[str, object]] = []
    emulated = matching(frame, where="emulated")
    by_reboot = reboots(emulated)
    for case in ("counts", "sizes", "losses", "faults"):
        for (vms, mib), _ in matching(by_reboot, case=case).groupby(["vms", "memory_mib"]):
            for how in HOWS:
                key = {"case": case, "how": how, "vms": vms, "memory_mib": mib}
                rebooted, guests = matching(by_reboot, **key), matching(emulated, **key)
                if not len(rebooted):
                    continue
                line: dict[str, object] = {
                    "case": case,
                    "guests": f"{vms} x {size(int(mib))}",
                    "how": how,
                    "n": len(rebooted),
                    "downtime": median_or_none(numbers(rebooted["downtime_s"])),
                }
                line |= {stage: median_or_none(seconds(numbers(rebooted[f"{stage}_us"]))) for stage in STAGES}
                line["as wanted"] = f"{int((guests['outcome'] == guests['wanted']).sum())} of {len(guests)}"
                line["connections lost"] = int(guests["sessions_lost"].sum())
                lines.append(line)
    return lines


def by_fault(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the fault points with their outcomes."""
    lines: list[dict[str, object]] = []
    for (fault, where), guests in matching(frame, case="faults").groupby(["fault", "where"], sort=True):
        line: dict[str, object] = {"fault": fault, "where": where, "reboots": int(guests["round"].nunique())}
        line |= {outcome: int((guests["outcome"] == outcome).sum()) for outcome in ("kept", "booted", "gone")}
        lines.append(line)
    return lines
