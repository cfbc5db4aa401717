"""Computes the figures and tables of VMM reboots from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each rebooted VM; `rows.Row` documents its columns. A VMM reboot replaces the QEMU under a guest
that continues. Ways (column `how`): `warm` (Rekindle, RAM stays in place), `cpr-transfer` (the peer: QEMU's own),
`saved` (RAM to disk and back), `cold` (shut down and boot).
"""

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from rekindle_bench.report import Bar, Contrast, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, pick, seconds
from rekindle_lab.guests import size
from rekindle_lab.stats import compare, median, p95

from .rows import HOWS

HEADLINE_MIB = 512
"""RAM at which warm is compared with cpr-transfer: the size with the most repetitions."""
SERVICE_CASES = ("ram", "sizes", "count", "solo", "debian")
"""Cases in which a client measures the service gap of each reboot."""
GUESTS = ["guest", "memory_mib", "vms"]
"""Columns that describe the guests of one operation."""


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _stopped_times(frame, findings)
    _eleven_vms(frame, findings)
    _losses(frame, findings)
    changed_bytes = pick(frame, "memory_changed_bytes", how="warm")
    if changed_bytes:
        findings.add("warm_memory_changed", changed_bytes, "bytes", Bar(0.0, "=="), value=max(changed_bytes))
    else:
        findings.report_missing("warm_memory_changed")
    return findings


def _stopped_times(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares guest-stopped times: with cpr-transfer, with saved reboots, and of a large guest with a small one."""

    def stopped_ms(how: str, memory_mib: int, case: str = "ram") -> Sample:
        values_us = pick(frame, "stopped_us", case=case, how=how, memory_mib=memory_mib)
        return Sample(f"{how}, {size(memory_mib)}", milliseconds(values_us))

    findings.add_ratio(
        "warm_vs_cpr_stopped",
        Bar(1.0),
        ours=stopped_ms("warm", HEADLINE_MIB),
        peer=stopped_ms("cpr-transfer", HEADLINE_MIB),
    )
    findings.add_ratio(
        "warm_8g_vs_512m_stopped",
        Bar(1.1),
        ours=stopped_ms("warm", 8192, "sizes"),
        peer=stopped_ms("warm", 512, "sizes"),
        with_peer=False,
    )
    findings.add_ratio("warm_vs_saved_2g", Bar(0.02), ours=stopped_ms("warm", 2048), peer=stopped_ms("saved", 2048))


def _eleven_vms(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the warm reboot of eleven VMs together with that of one."""
    # All rows of one operation have the same total: one of them counts.
    operations = frame.drop_duplicates(["case", *GUESTS, "how", "round"])

    def total_s(**where: str | int) -> list[float]:
        return seconds(pick(operations, "total_us", how="warm", **where))

    eleven_vms, one_vm, one_of_many = total_s(case="count", vms=11), total_s(case="count", vms=1), total_s(case="solo")
    if not eleven_vms or not one_vm:
        findings.report_missing("warm_11_vms_total", "11 VMs or for one")
        return
    findings.add(
        "warm_11_vms_total",
        eleven_vms,
        "s",
        Bar(1.0),
        contrast=Contrast.of(Sample("11 VMs", eleven_vms), Sample("1 VM", one_vm), "s", with_peer=False),
        ratio_bar=Bar(11.0, "<"),  # 11 times the time of one VM would be no gain over reboots in a row
        extra={"ratio_to_one_among_all": median(eleven_vms) / median(one_of_many)} if one_of_many else {},
    )


def _losses(frame: pd.DataFrame, findings: Findings) -> None:
    """Counts the sessions, requests and connections that warm reboots under load have lost."""
    sessions_lost = pick(frame, "sessions_lost", case="losses")
    load = matching(frame, case="load")
    if sessions_lost and len(load):
        lost = sum(sessions_lost) + float(load["failed"].sum()) + float(load["connections_lost"].sum())
        findings.add("warm_losses_50", sessions_lost, "lost", Bar(0.0, "=="), value=lost)
    else:
        findings.report_missing("warm_losses_50")


def label(row: "pd.Series[object]") -> str:
    """Describes for the tables which guests were rebooted."""
    guest = f"{row['guest']} {size(int(str(row['memory_mib'])))}"
    among = {"solo": "1 of many x ", "count": f"{row['vms']} x "}.get(str(row["case"]), "")
    in_turn = " (by turns)" if row["case"] == "sizes" else ""
    return f"{among}{guest}{in_turn}"


def _by_guests(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yields the rows of each case and kind, size and number of guests, in the order of the tables."""
    for case in SERVICE_CASES:
        for _, rows in matching(frame, case=case).groupby(GUESTS, sort=True):
            yield rows


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists each case and way: guest-stopped time and service gap in ms, and warm's share of the guest-stopped time.

    A cold reboot shuts the guest down and boots it instead of stopping it: compare the service gaps for that way.
    """
    lines: list[dict[str, object]] = []
    for of_guests in _by_guests(frame):
        warm_ms = milliseconds(pick(of_guests, "stopped_us", how="warm"))
        for how in HOWS:
            rows = matching(of_guests, how=how)
            stopped_ms = milliseconds(pick(rows, "stopped_us")) if how != "cold" else []
            gap_ms = milliseconds(pick(rows, "gap_us"))
            if not stopped_ms and not gap_ms:
                continue
            can_divide = warm_ms and stopped_ms and median(stopped_ms)
            lines.append(
                {
                    "guests": label(rows.iloc[0]),
                    "how": how,
                    "n": int(rows["round"].nunique()),
                    "stopped ms": median_or_none(stopped_ms),
                    "stopped p95": p95(stopped_ms) if stopped_ms else None,
                    "warm / this": median(warm_ms) / median(stopped_ms) if can_divide else None,
                    "gap ms": median_or_none(gap_ms),
                    "gap p95": p95(gap_ms) if gap_ms else None,
                    "failed": int(rows["failed"].sum()),
                    "connections lost": int(rows["connections_lost"].sum()),
                }
            )
    return lines


def versus_cpr(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Compares warm with cpr-transfer in every case that has both: ratios of medians with their 95% interval."""
    lines: list[dict[str, object]] = []
    for rows in _by_guests(frame):
        for what, column in (("guest-stopped time", "stopped_us"), ("service gap", "gap_us")):
            warm_ms = milliseconds(pick(rows, column, how="warm"))
            cpr_ms = milliseconds(pick(rows, column, how="cpr-transfer"))
            if len(warm_ms) < 2 or len(cpr_ms) < 2 or min(cpr_ms) <= 0:
                continue
            comparison = compare(warm_ms, cpr_ms)
            lines.append(
                {
                    "guests": label(rows.iloc[0]),
                    "what": what,
                    "warm ms": comparison.ours,
                    "cpr-transfer ms": comparison.peer,
                    "ratio": comparison.ratio,
                    "low": comparison.low,
                    "high": comparison.high,
                    "p": comparison.p,
                    "warm is": comparison.verdict,
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
    keys = ["case", *GUESTS, "how", "round"]
    operations = []
    for key, rows in frame[frame["case"].isin(SERVICE_CASES)].groupby(keys, sort=True):
        operation = dict(zip(keys, key, strict=True))
        pre_ms, post_ms = _pre_and_post_ms(rows) if operation["how"] != "cpr-transfer" else (None, None)
        stopped_ms = milliseconds(pick(rows, "stopped_us")) if operation["how"] != "cold" else []
        operation |= {"pre_ms": pre_ms, "post_ms": post_ms, "stopped_ms": median_or_none(stopped_ms)}
        operations.append(operation | {"gap_ms": median_or_none(milliseconds(pick(rows, "gap_us")))})
    return pd.DataFrame(operations, columns=[*keys, "pre_ms", "post_ms", "stopped_ms", "gap_ms"])


def _pre_and_post_ms(rows: pd.DataFrame) -> tuple[float | None, float | None]:
    """Returns `pre_ms` and `post_ms` (see `tasks`) of one operation; `None` if they were not observed."""
    begins_us, ends_us, answers_us = [], [], []
    for _, row in rows.iterrows():
        steps: list[dict[str, Any]] = json.loads(row["steps"]) if isinstance(row["steps"], str) else []
        for step in steps:
            if step["phase"] == "suspend":
                begins_us.append(step["start_host_us"])
                ends_us.append(step["start_host_us"] + step["us"])
        # Without a client's gap, the guest's resume counts as its first answer.
        answer_us = row["gap_end_host_us"] if pd.notna(row["gap_end_host_us"]) else row["resume_host_us"]
        if pd.notna(answer_us):
            answers_us.append(answer_us)
    if not begins_us or not answers_us:
        return None, None
    return (max(ends_us) - min(begins_us)) / 1e3, max(0.0, (max(answers_us) - max(ends_us)) / 1e3)
