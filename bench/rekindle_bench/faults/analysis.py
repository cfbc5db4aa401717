"""Computes the figures and tables of the fault experiment from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each run: faults, a reboot, and a comparison of the disk with what the guest reads; `rows.Row`
documents its columns. `checked` is 1 if the disk server checks the digest of each retained block, 0 in the control.
"""

import json

import pandas as pd

from rekindle_bench.report import Bar, Findings
from rekindle_bench.rows import matching, numbers
from rekindle_lab.stats import median

from .kinds import KINDS
from .rows import OUTCOMES


def runs(frame: pd.DataFrame, checked: int) -> pd.DataFrame:
    """Returns the runs in which all blocks were compared."""
    of_server = matching(frame, checked=checked)
    return of_server[of_server["wrong"].notna()]


def _blocks_hit(rows: pd.DataFrame) -> int:
    """Returns the number of blocks whose page-cache frames were damaged, over all runs."""
    return int(rows["hit"].map(lambda blocks_json: len(json.loads(blocks_json))).sum())


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures: the bar, the control that shows that the experiment can fail, and the number of tries."""
    findings = Findings(raw)
    for name, checked, bar in (("blocks_wrong", 1, Bar(0, "==")), ("blocks_wrong_unchecked", 0, Bar(1, ">="))):
        # Runs of the control without faults are in the tables only.
        with_faults = frame[frame["kind"] != "none"]
        damaged = runs(with_faults, checked)
        if not len(damaged):
            findings.report_missing(name)
            continue
        wrong = numbers(damaged["wrong"])
        extra = {
            "compared": float(damaged["compared"].sum()),
            "served": float(damaged["served"].sum()),
            "refused": float(damaged["refused"].sum()),
            "hit": float(_blocks_hit(damaged)),
            "hit_wrong": float(damaged["hit_wrong"].sum()),
            "runs_wrong": float((damaged["wrong"] > 0).sum()),
            "runs_unfinished": float(matching(with_faults, checked=checked)["wrong"].isna().sum()),
        }
        findings.add(name, wrong, "", bar, value=sum(wrong), extra=extra)
    return findings


def by_kind(frame: pd.DataFrame, checked: int) -> list[dict[str, object]]:
    """Lists the types of faults: figures 14 and 15 as a table."""
    lines: list[dict[str, object]] = []
    for kind in KINDS:
        started = matching(frame, checked=checked, kind=kind.name)
        finished = runs(started, checked)
        if not len(started):
            continue
        line: dict[str, object] = {"type": kind.name, "class": kind.of_class, "n": len(finished)}
        line |= {outcome: int((finished["outcome"] == outcome).sum()) for outcome in OUTCOMES}
        line["unfinished"] = len(started) - len(finished)
        if len(finished):
            line |= {name: int(median(numbers(finished[name]))) for name in ("kept", "served", "refused")}
            if checked == 0:
                line["blocks hit"] = _blocks_hit(finished)
                line["of those wrong"] = int(finished["hit_wrong"].sum())
            line["runs with refused"] = int((finished["refused"] > 0).sum())
            line["runs with wrong"] = int((finished["wrong"] > 0).sum())
            line["blocks wrong"] = int(finished["wrong"].sum())
        lines.append(line)
    return lines


def by_outcome(frame: pd.DataFrame, checked: int) -> list[dict[str, object]]:
    """Lists the outcomes with the way of the reboot."""
    lines: list[dict[str, object]] = []
    for (outcome, way), group in runs(frame, checked).groupby(["outcome", "way"], sort=True):
        lines.append(
            {
                "outcome": outcome,
                "rebooted by": way,
                "n": len(group),
                "kernel complained": int(group["oops"].sum()),
                "blocks served": int(group["served"].sum()),
                "blocks refused": int(group["refused"].sum()),
                "blocks wrong": int(group["wrong"].sum()),
            }
        )
    return lines
