"""Computes the figures of VMM reboots from raw rows alone, so that a file can be analysed again."""

import json

import pandas as pd

from rekindle_bench.report import Bar, Figure, Findings
from rekindle_bench.rows import milliseconds, pick
from rekindle_lab.guests import size
from rekindle_lab.stats import compare, median, p95

from .rows import HOWS

HEADLINE_MIB = 512
"""RAM at which warm is compared with cpr-transfer: the size with the most repetitions."""
SERVICE_CASES = ("ram", "sizes", "count", "solo", "debian")


def operations(frame: pd.DataFrame, column: str, **where: str | int) -> list[float]:
    """Returns values as `pick` does, but one per operation, for columns in which all rows of an operation agree."""
    return pick(frame.drop_duplicates(["case", "guest", "memory_mib", "vms", "how", "round"]), column, **where)


def stopped_ms(frame: pd.DataFrame, how: str, memory_mib: int, case: str = "ram") -> list[float]:
    """Returns the guest-stopped times of a way for one size of guests, in ms."""
    return milliseconds(pick(frame, "stopped_us", case=case, how=how, memory_mib=memory_mib))


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _stopped_times(frame, findings)
    _eleven_vms(frame, findings)
    _losses(frame, findings)
    changed = pick(frame, "memory_changed_bytes", how="warm")
    if changed:
        findings.add_sample("warm_memory_changed", "bytes", changed, Bar(0.0, "=="), value=max(changed))
    else:
        findings.report_missing("warm_memory_changed")
    return findings


def _stopped_times(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares guest-stopped times: with cpr-transfer, with saved reboots, and of a large guest with a small one."""
    headline_size = size(HEADLINE_MIB)
    findings.ratio(
        "warm_vs_cpr_stopped",
        Bar(1.0),
        stopped_ms(frame, "warm", HEADLINE_MIB),
        stopped_ms(frame, "cpr-transfer", HEADLINE_MIB),
        f"warm, {headline_size}",
        f"cpr-transfer, {headline_size}",
    )
    findings.ratio(
        "warm_8g_vs_512m_stopped",
        Bar(1.1),
        stopped_ms(frame, "warm", 8192, "sizes"),
        stopped_ms(frame, "warm", 512, "sizes"),
        "warm, 8G",
        "warm, 512M",
        of_peer=False,
    )
    warm, saved = stopped_ms(frame, "warm", 2048), stopped_ms(frame, "saved", 2048)
    findings.ratio("warm_vs_saved_2g", Bar(0.02), warm, saved, "warm, 2G", "saved, 2G")


def _eleven_vms(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the warm reboot of eleven VMs together with that of one."""

    def total_s(**where: str | int) -> list[float]:
        return [value / 1e6 for value in operations(frame, "total_us", how="warm", **where)]

    eleven_vms, one_vm, solo = total_s(case="count", vms=11), total_s(case="count", vms=1), total_s(case="solo")
    if not eleven_vms or not one_vm:
        findings.report_missing("warm_11_vms_total", "11 VMs or for one")
        return
    comparison = compare(eleven_vms, one_vm)
    findings.add(
        Figure(
            "warm_11_vms_total",
            comparison.ours,
            "s",
            comparison.n_ours,
            comparison.ours_p95,
            Bar(1.0),
            findings.raw,
            comparison,
            "s",
            "11 VMs",
            "1 VM",
            ratio_bar=Bar(11.0, "<"),
            of_peer=False,
            extra={"ratio_to_one_among_all": comparison.ours / median(solo)} if solo else {},
        )
    )


def _losses(frame: pd.DataFrame, findings: Findings) -> None:
    """Counts the sessions, requests and connections that warm reboots under load have lost."""
    sessions = pick(frame, "sessions_lost", case="losses")
    load = frame[frame["case"] == "load"]
    if sessions and len(load):
        lost = sum(sessions) + float(load["failed"].sum()) + float(load["connections_lost"].sum())
        findings.add_sample("warm_losses_50", "lost", sessions, Bar(0.0, "=="), value=lost)
    else:
        findings.report_missing("warm_losses_50")


def label(row: "pd.Series[object]") -> str:
    """Describes for the tables which guests were rebooted."""
    what = f"{row['guest']} {size(int(str(row['memory_mib'])))}"
    among = {"solo": "1 of many x ", "count": f"{row['vms']} x "}.get(str(row["case"]), "")
    turn = " (by turns)" if row["case"] == "sizes" else ""
    return f"{among}{what}{turn}"


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists each case and way: guest-stopped time and service gap in ms, and warm's share of the guest-stopped time.

    A cold reboot shuts the guest down and boots it instead of stopping it: compare the service gaps for that way.
    """
    lines: list[dict[str, object]] = []
    keys = ["case", "guest", "memory_mib", "vms"]
    for case in SERVICE_CASES:
        for _, group in frame[frame["case"] == case].groupby(keys, sort=True):
            warm = milliseconds(pick(group, "stopped_us", how="warm"))
            for how in HOWS:
                rows = group[group["how"] == how]
                stopped = milliseconds(pick(rows, "stopped_us")) if how != "cold" else []
                gap = milliseconds(pick(rows, "gap_us"))
                if not stopped and not gap:
                    continue
                lines.append(
                    {
                        "guests": label(rows.iloc[0]),
                        "how": how,
                        "n": int(rows["round"].nunique()),
                        "stopped ms": median(stopped) if stopped else None,
                        "stopped p95": p95(stopped) if stopped else None,
                        "warm / this": median(warm) / median(stopped) if warm and stopped and median(stopped) else None,
                        "gap ms": median(gap) if gap else None,
                        "gap p95": p95(gap) if gap else None,
                        "failed": int(rows["failed"].sum()),
                        "connections lost": int(rows["connections_lost"].sum()),
                    }
                )
    return lines


def versus_cpr(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Compares warm with cpr-transfer in every case that has both: ratios of medians with their 95% interval."""
    lines: list[dict[str, object]] = []
    for case in SERVICE_CASES:
        for _, group in frame[frame["case"] == case].groupby(["guest", "memory_mib", "vms"], sort=True):
            for what, column in (("guest-stopped time", "stopped_us"), ("service gap", "gap_us")):
                ours = milliseconds(pick(group, column, how="warm"))
                peer = milliseconds(pick(group, column, how="cpr-transfer"))
                if len(ours) < 2 or len(peer) < 2 or min(peer) <= 0:
                    continue
                of = compare(ours, peer)
                lines.append(
                    {
                        "guests": label(group.iloc[0]),
                        "what": what,
                        "warm ms": of.ours,
                        "cpr-transfer ms": of.peer,
                        "ratio": of.ratio,
                        "low": of.low,
                        "high": of.high,
                        "p": of.p,
                        "warm is": of.verdict,
                    }
                )
    return lines


def tasks(frame: pd.DataFrame) -> pd.DataFrame:
    """Lists the tasks before and after the VMM is replaced, one row per operation, in ms: the paper's figures 5 and 6.

    `pre_ms`: from the first guest's suspension (or request to shut down) to the end of the last one's. `post_ms`: from
    then until the last guest's service answers again. `stopped_ms`, `gap_ms`: of the median guest of the operation.
    `pre_ms` and `post_ms` are missing for cpr-transfer, which does both tasks in one step that cannot be divided from
    outside; `stopped_ms` is missing for a cold reboot, which shuts the guest down instead.
    """
    keys = ["case", "guest", "memory_mib", "vms", "how", "round"]
    rows = []
    for key, group in frame[frame["case"].isin(SERVICE_CASES)].groupby(keys, sort=True):
        begins, ends, answers = [], [], []
        for _, row in group.iterrows():
            steps = json.loads(row["steps"]) if isinstance(row["steps"], str) else []
            suspend = [step for step in steps if step["phase"] == "suspend"]
            begins += [step["start_host_us"] for step in suspend]
            ends += [step["start_host_us"] + step["us"] for step in suspend]
            answers += [row[name] for name in ("gap_end_host_us", "resume_host_us") if pd.notna(row[name])][:1]
        line = dict(zip(keys, key, strict=True))
        whole = line["how"] != "cpr-transfer" and begins and answers
        line["pre_ms"] = (max(ends) - min(begins)) / 1e3 if whole else None
        line["post_ms"] = max(0.0, (max(answers) - max(ends)) / 1e3) if whole else None
        for column, name in (("stopped_us", "stopped_ms"), ("gap_us", "gap_ms")):
            values = milliseconds(pick(group, column))
            known = values and not (line["how"] == "cold" and name == "stopped_ms")
            line[name] = median(values) if known else None
        rows.append(line)
    return pd.DataFrame(rows, columns=[*keys, "pre_ms", "post_ms", "stopped_ms", "gap_ms"])
