"""Computes the figures and tables of fail-overs from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each fault, or for each window of the case `output`; `rows.Row` documents its columns. The guest
counts *ticks* of 50 ms. After a fail-over it continues from a checkpoint, so ticks that a client has seen can be lost.
"""

from collections.abc import Sequence

import pandas as pd

from rekindle_bench.report import NO_BAR, Bar, Findings, Sample
from rekindle_bench.rows import matching, milliseconds, numbers, pick, seconds
from rekindle_lab.stats import median, p95

from .faults import KILLS

BARS = {
    "failover_s": Bar(4.0),
    "failover_restore_s": Bar(0.5),
    "split_brain": Bar(0.0, "=="),
    "counter_back": Bar(0.0, "=="),
    "counter_back_held": Bar(0.0, "=="),
    "counter_back_held_off": Bar(1.0, ">="),
    "not_recovered": Bar(0.0, "=="),
    "spare_memory": Bar(0.01),
}
FAULTS = ("failover", "faults", "held", "held-off")
"""The cases in which a row is a fault."""


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows.

    A fault after which the cluster did not recover, or that was not watched all the time, has a row but is not counted
    in n: a figure with fewer rows than planned has missed its bar.
    """
    findings = Findings(raw)
    # Also the kills that measure the time of a fail-over are faults.
    faults = frame[frame["case"].isin(FAULTS)]
    _fail_over_times(frame, findings)
    _outcomes(faults, findings)
    _add(findings, "spare_memory", "", numbers(faults["spare_bytes"] / faults["guest_bytes"]))
    _output(frame, findings)
    _unknown_outcomes(faults, findings)
    return findings


def _fail_over_times(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the time from a node's death, and from its fencing, to the first answer of its guest elsewhere."""
    kills = matching(frame, case="failover", recovered=True)
    planned = _planned(frame, ["failover"])
    _add(findings, "failover_s", "s", seconds(numbers(kills["answer_us"] - kills["at_us"])), planned)
    _add(findings, "failover_restore_s", "s", seconds(numbers(kills["answer_us"] - kills["fenced_us"])), planned)


def _outcomes(faults: pd.DataFrame, findings: Findings) -> None:
    """Adds how often two guests ran, how many ticks were lost, and how often the cluster did not recover."""
    # Two figures are meaningless for kills alone: without the case `faults` they are reported as missing.
    several_kinds = faults if "faults" in set(faults["case"]) else faults.iloc[:0]
    without_output_commit = several_kinds[~several_kinds["case"].isin(("held", "held-off"))]
    _add_sum(findings, "split_brain", several_kinds, "overlaps")
    _add_sum(findings, "counter_back", without_output_commit, "beyond")
    _add_sum(findings, "counter_back_held", matching(faults, case="held"), "beyond")
    _add_sum(findings, "counter_back_held_off", matching(faults, case="held-off"), "beyond")
    not_recovered = faults.assign(not_recovered=~faults["recovered"])
    _add_sum(findings, "not_recovered", not_recovered, "not_recovered", n=len(faults))


def _unknown_outcomes(faults: pd.DataFrame, findings: Findings) -> None:
    """Reports kills without a time of fencing, and faults from which the cluster did not recover."""
    kills = faults[faults["kind"].isin(KILLS)]
    unfenced = int(kills["fenced_us"].isna().sum())
    if unfenced:
        findings.absent.append(f"the time of fencing: not known of {unfenced} of {len(kills)} kills")
    for _, row in faults[~faults["recovered"]].iterrows():
        findings.absent.append(f"{row['case']} {row['round'] + 1} ({row['kind']}): not recovered: {row['trouble']}")


def _planned(frame: pd.DataFrame, cases: Sequence[str]) -> int:
    """Returns the number of rows planned for those of `cases` that were started."""
    rows = frame[frame["case"].isin(cases)]
    return int(rows.groupby("case")["planned"].max().sum()) if len(rows) else 0


def _add(findings: Findings, name: str, unit: str, values: list[float], planned: int | None = None) -> None:
    if values:
        findings.add(name, values, unit, BARS[name], planned=planned)
    else:
        findings.report_missing(name)


def _add_sum(findings: Findings, name: str, rows: pd.DataFrame, column: str, *, n: int | None = None) -> None:
    """Adds the sum of a column. `n`: number of faults that count; by default those from which the cluster recovered."""
    values = numbers(rows[column])
    if not values:
        findings.report_missing(name)
        return
    n = int(rows["recovered"].sum()) if n is None else n
    findings.add(name, values, "", BARS[name], value=sum(values), n=n, planned=_planned(rows, FAULTS))


def _output(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares output commit with checkpoints alone at the same interval: round trips, and answers per second."""
    windows = matching(frame, case="output")
    if not len(windows):
        findings.report_missing("output_commit_rtt")
    for every_s in sorted(windows["every_s"].dropna().unique()):
        for name, column, unit in (("rtt", "median_us", "ms"), ("rtt_p99", "p99_us", "ms"), ("per_s", "per_s", "1/s")):
            ours, alone = (pick(windows, column, kind=how, every_s=every_s) for how in ("output-commit", "protect"))
            if unit == "ms":
                ours, alone = milliseconds(ours), milliseconds(alone)
            findings.add_ratio(
                f"output_commit_{name}_{every_s:g}s",
                NO_BAR,
                ours=Sample(f"output commit, every {every_s:g} s", ours),
                peer=Sample("protection alone", alone),
                with_peer=False,
                unit=unit,
            )


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Splits each fail-over after a kill: until fenced, until the guest ran, until it answered, in s."""
    kills = matching(frame, case="failover", recovered=True)
    kills = kills[kills["fenced_us"].notna()]
    return pd.DataFrame(
        {
            "seen and fenced": (kills["fenced_us"] - kills["at_us"]) / 1e6,
            "decided, restored": (kills["running_us"] - kills["fenced_us"]) / 1e6,
            "first answer": (kills["answer_us"] - kills["running_us"]) / 1e6,
        }
    )


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the parts of a fail-over with their medians."""
    return [
        {"part": name, "n": int(column.count()), "median s": median(list(column)), "p95": p95(list(column))}
        for name, column in parts(frame).items()
        if column.count()
    ]


def by_kind(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Summarizes the outcomes of each kind of fault."""
    lines: list[dict[str, object]] = []
    for (case, kind), group in frame[frame["case"].isin(FAULTS)].groupby(["case", "kind"], sort=True):
        lines.append(
            {
                "case": case,
                "fault": kind,
                "n": len(group),
                "recovered": int(group["recovered"].sum()),
                "failed over": int(group["elsewhere"].sum()),
                "no fencing time": int(group["fenced_us"].isna().sum()) if kind in KILLS else None,
                "longest silence s": float(group["gap_s"].max()),
                "most ticks back": int(group["back"].max()),
                "as answers show": int(group["back_answers"].max()),
                "beyond what is allowed": int(group["beyond"].sum()),
                "two at once": int(group["overlaps"].sum()),
            }
        )
    return lines


def output(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists medians over the windows of each way and interval."""
    lines: list[dict[str, object]] = []
    for (every_s, how), group in matching(frame, case="output").groupby(["every_s", "kind"], sort=True, dropna=False):
        lines.append(
            {
                "every s": None if pd.isna(every_s) else every_s,
                "how": how,
                "n": len(group),
                "round trips": int(group["trips"].sum()),
                "median ms": median(milliseconds(pick(group, "median_us"))),
                "p99 ms": median(milliseconds(pick(group, "p99_us"))),
                "answers/s": median(pick(group, "per_s")),
            }
        )
    return lines
