"""Computes the figures of host reboots from raw rows alone, so that a file can be analysed again."""

import pandas as pd

from rekindle_bench.report import Bar, Figure, Findings
from rekindle_bench.rows import pick
from rekindle_lab.guests import size
from rekindle_lab.stats import compare, median, p95

from .plan import SMALL_MIB
from .rows import HOWS

KEYS = ["case", "how", "vms", "memory_mib", "where", "round"]
STAGES = ("services", "suspend", "down", "firmware", "kernel", "userspace", "resume")
LARGE_MIB = 1024
MANY = 4


def reboots(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each reboot: the values that its guests share, and their longest downtime, in s."""
    first = frame.drop_duplicates(KEYS).set_index(KEYS)
    downtime = frame.groupby(KEYS)["gap_us"].max() / 1e6
    both = first.assign(
        downtime_s=downtime,
        both_s=(first["suspend_us"] + first["resume_us"]) / 1e6,
        before_s=first["suspend_us"] / 1e6,
        after_s=first["resume_us"] / 1e6,
    )
    return both.reset_index()


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    all_of = reboots(frame)
    _suspend_resume(all_of, findings)
    _warm_vs_cold(all_of, findings)
    _lost_connections(frame, all_of, findings)
    _lost_guests(frame, all_of, findings)
    return findings


def _suspend_resume(all_of: pd.DataFrame, findings: Findings) -> None:
    """Adds the time of suspend and resume together, and how it grows with a guest's RAM."""

    def both_s(**where: str | int) -> list[float]:
        return pick(all_of, "both_s", how="warm", **where)

    of_many_guests = both_s(case="counts", vms=MANY)
    large, small = both_s(case="sizes", memory_mib=LARGE_MIB), both_s(case="sizes", memory_mib=SMALL_MIB)
    if not of_many_guests or not large or not small:
        missing = f"{MANY} guests, or one of {size(SMALL_MIB)} and of {size(LARGE_MIB)}"
        findings.report_missing("host_suspend_resume", missing)
        return
    findings.add(
        Figure(
            "host_suspend_resume",
            median(of_many_guests),
            "s",
            len(of_many_guests),
            p95(of_many_guests),
            Bar(1.0),
            findings.raw,
            compare(large, small),
            "s",
            f"1 guest, {size(LARGE_MIB)}",
            f"1 guest, {size(SMALL_MIB)}",
            ratio_bar=Bar(1.1),
            of_peer=False,
            extra={"one_guest_s": median(small)},
        )
    )


def _warm_vs_cold(all_of: pd.DataFrame, findings: Findings) -> None:
    """Compares the downtime of warm and cold reboots."""
    cold = all_of[(all_of["case"] == "counts") & (all_of["how"] == "cold") & (all_of["vms"] == MANY)]
    firmware_s = [float(value) / 1e6 for value in cold["firmware_us"].dropna()]
    findings.ratio(
        "host_warm_vs_cold",
        Bar(0.26),
        pick(all_of, "downtime_s", case="counts", how="warm", vms=MANY),
        pick(all_of, "downtime_s", case="counts", how="cold", vms=MANY),
        f"warm, {MANY} guests",
        f"cold, {MANY} guests",
        of_peer=False,
        unit="s",
        extra={"cold_firmware_share": median(firmware_s) / median(list(cold["downtime_s"]))} if firmware_s else {},
    )


def _lost_connections(frame: pd.DataFrame, all_of: pd.DataFrame, findings: Findings) -> None:
    lost = pick(frame, "sessions_lost", case="losses", how="warm")
    if not lost:
        findings.report_missing("host_tcp_lost")
        return
    rounds = int((all_of["case"] == "losses").sum())
    extra = {"connections": float(len(lost)), "reboots": float(rounds)}
    bar = Bar(0.0, "==")
    findings.add(Figure("host_tcp_lost", sum(lost), "", rounds, p95(lost), bar, findings.raw, extra=extra))


def _lost_guests(frame: pd.DataFrame, all_of: pd.DataFrame, findings: Findings) -> None:
    """Counts the guests whose memory was lost in reboots with a fault."""
    faults = frame[frame["case"] == "faults"]
    if not len(faults):
        findings.report_missing("host_guests_lost")
        return
    lost = [float(value) for value in faults["outcome"] != "kept"]
    reboots_by_place = all_of[all_of["case"] == "faults"]["where"].value_counts()
    extra = {f"reboots_{place}": float(reboots_by_place.get(place, 0)) for place in ("direct", "emulated")}
    extra["guests"] = float(len(lost))
    n, bar = int(reboots_by_place.sum()), Bar(0.0, "==")
    findings.add(Figure("host_guests_lost", sum(lost), "", n, p95(lost), bar, findings.raw, extra=extra))


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians in s by case, way, number of guests and size."""
    lines: list[dict[str, object]] = []
    all_of = reboots(frame[frame["where"] == "emulated"])
    for case in ("counts", "sizes", "losses", "faults"):
        of_case = all_of[all_of["case"] == case]
        for (vms, mib), group in of_case.groupby(["vms", "memory_mib"]):
            for how in HOWS:
                chosen = group[group["how"] == how]
                if not len(chosen):
                    continue
                guests = frame[(frame["case"] == case) & (frame["how"] == how)]
                guests = guests[(guests["vms"] == vms) & (guests["memory_mib"] == mib)]
                guests = guests[guests["where"] == "emulated"]
                line: dict[str, object] = {
                    "case": case,
                    "guests": f"{vms} x {size(int(mib))}",
                    "how": how,
                    "n": len(chosen),
                    "downtime": _median(chosen["downtime_s"]),
                }
                line |= {name: _median(chosen[f"{name}_us"] / 1e6) for name in STAGES}
                line["as wanted"] = f"{int((guests['outcome'] == guests['wanted']).sum())} of {len(guests)}"
                line["connections lost"] = int(guests["sessions_lost"].sum())
                lines.append(line)
    return lines


def _median(values: "pd.Series[float]") -> float | None:
    known = [float(value) for value in values.dropna()]
    return median(known) if known else None


def by_fault(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the fault points with their outcomes."""
    faults = frame[frame["case"] == "faults"]
    lines: list[dict[str, object]] = []
    for (fault, where), group in faults.groupby(["fault", "where"], sort=True):
        line: dict[str, object] = {"fault": fault, "where": where, "reboots": int(group["round"].nunique())}
        line |= {name: int((group["outcome"] == name).sum()) for name in ("kept", "booted", "gone")}
        lines.append(line)
    return lines
