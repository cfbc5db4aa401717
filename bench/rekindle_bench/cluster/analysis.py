"""Computes the figures of fail-overs from raw rows alone, so that a file can be analysed again."""

from collections.abc import Sequence

import pandas as pd

from rekindle_bench.report import NO_BAR, Bar, Figure, Findings
from rekindle_bench.rows import milliseconds, pick
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
    kills = frame[(frame["case"] == "failover") & frame["recovered"]]
    planned = _planned(frame, ["failover"])
    _add(findings, "failover_s", "s", seconds(kills, "at_us", "answer_us"), planned)
    _add(findings, "failover_restore_s", "s", seconds(kills, "fenced_us", "answer_us"), planned)
    # The figures below cover all faults, also the kills that measure the time of a fail-over.
    faulted = frame[frame["case"].isin(FAULTS)]
    several = faulted if len(faulted[faulted["case"] == "faults"]) else faulted.iloc[:0]
    free = several[~several["case"].isin(("held", "held-off"))]
    for name, rows, column in (
        ("split_brain", several, "overlaps"),
        ("counter_back", free, "beyond"),
        ("counter_back_held", faulted[faulted["case"] == "held"], "beyond"),
        ("counter_back_held_off", faulted[faulted["case"] == "held-off"], "beyond"),
    ):
        _together(findings, name, rows, [float(value) for value in rows[column]])
    _together(findings, "not_recovered", faulted, [float(not value) for value in faulted["recovered"]], of_all=True)
    spare = faulted[faulted["spare_bytes"].notna()]
    _add(findings, "spare_memory", "", [float(value) for value in spare["spare_bytes"] / spare["guest_bytes"]])
    _output(frame, findings)
    unfenced = faulted[faulted["kind"].isin(KILLS) & faulted["fenced_us"].isna()]
    if len(unfenced):
        of = len(faulted[faulted["kind"].isin(KILLS)])
        findings.absent.append(f"the time of fencing: not known of {len(unfenced)} of {of} kills")
    for _, row in faulted[~faulted["recovered"]].iterrows():
        findings.absent.append(f"{row['case']} {row['round'] + 1} ({row['kind']}): not recovered: {row['trouble']}")
    return findings


def seconds(rows: pd.DataFrame, begin: str, end: str) -> list[float]:
    """Returns the seconds between two columns, for the rows that have both."""
    return [float(value) for value in ((rows[end] - rows[begin]) / 1e6).dropna()]


def _planned(frame: pd.DataFrame, cases: Sequence[str]) -> int:
    """Returns the number of rows planned for those of `cases` that were started."""
    rows = frame[frame["case"].isin(cases)]
    return int(rows.groupby("case")["planned"].max().sum()) if len(rows) else 0


def _add(findings: Findings, name: str, unit: str, values: list[float], planned: int | None = None) -> None:
    if not values:
        findings.report_missing(name)
        return
    figure = Figure(name, median(values), unit, len(values), p95(values), BARS[name], findings.raw, planned=planned)
    findings.add(figure)


def _together(findings: Findings, name: str, rows: pd.DataFrame, values: list[float], *, of_all: bool = False) -> None:
    if not values:
        findings.report_missing(name)
        return
    n = len(rows) if of_all else int(rows["recovered"].sum())
    planned = _planned(rows, FAULTS)
    findings.add(Figure(name, sum(values), "", n, p95(values), BARS[name], findings.raw, planned=planned))


def _output(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares output commit with protection alone at the same interval: round trips, and answers per second."""
    rows = frame[frame["case"] == "output"]
    if not len(rows):
        findings.report_missing("output_commit_rtt")
    for every_s in sorted(rows["every_s"].dropna().unique()):
        for name, column, unit in (("rtt", "median_us", "ms"), ("rtt_p99", "p99_us", "ms"), ("per_s", "per_s", "1/s")):
            ours, alone = (pick(rows, column, kind=how, every_s=every_s) for how in ("output-commit", "protect"))
            if unit == "ms":
                ours, alone = milliseconds(ours), milliseconds(alone)
            what = f"output commit, every {every_s:g} s", "protection alone"
            findings.ratio(f"output_commit_{name}_{every_s:g}s", NO_BAR, ours, alone, *what, of_peer=False, unit=unit)


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Splits each fail-over after a kill: until fenced, until the guest ran, until it answered, in s."""
    kills = frame[(frame["case"] == "failover") & frame["recovered"] & frame["fenced_us"].notna()]
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
    rows = frame[frame["case"] == "output"]
    for (every_s, how), group in rows.groupby(["every_s", "kind"], sort=True, dropna=False):
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
