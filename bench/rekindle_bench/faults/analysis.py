"""Computes the figures of the fault experiment from raw rows alone, so that a file can be analysed again."""

import json

import pandas as pd

from rekindle_bench.report import Bar, Findings
from rekindle_lab.stats import median

from .kinds import KINDS
from .rows import OUTCOMES


def runs(frame: pd.DataFrame, checked: int) -> pd.DataFrame:
    """Returns the runs in which all blocks were compared."""
    return frame[(frame["checked"] == checked) & frame["wrong"].notna()]


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures: the bar, the control that shows that the experiment can fail, and the number of tries."""
    findings = Findings(raw)
    for name, checked, bar in (("blocks_wrong", 1, Bar(0, "==")), ("blocks_wrong_unchecked", 0, Bar(1, ">="))):
        # Runs of the control without faults are in the tables only.
        damaged = runs(frame, checked)
        damaged = damaged[damaged["kind"] != "none"]
        if not len(damaged):
            findings.report_missing(name)
            continue
        wrong = [float(value) for value in damaged["wrong"]]
        extra = {
            "compared": float(damaged["compared"].sum()),
            "served": float(damaged["served"].sum()),
            "refused": float(damaged["refused"].sum()),
            "hit": float(damaged["hit"].map(lambda text: len(json.loads(text))).sum()),
            "hit_wrong": float(damaged["hit_wrong"].sum()),
            "runs_wrong": float((damaged["wrong"] > 0).sum()),
            "runs_unfinished": float(
                ((frame["checked"] == checked) & frame["wrong"].isna() & (frame["kind"] != "none")).sum()
            ),
        }
        findings.add_sample(name, "", wrong, bar, value=sum(wrong), extra=extra)
    return findings


def by_kind(frame: pd.DataFrame, checked: int) -> list[dict[str, object]]:
    """Lists the types of faults: figures 14 and 15 as a table."""
    lines: list[dict[str, object]] = []
    chosen = frame[frame["checked"] == checked]
    for kind in KINDS:
        all_of = chosen[chosen["kind"] == kind.name]
        finished = runs(all_of, checked)
        if not len(all_of):
            continue
        line: dict[str, object] = {"type": kind.name, "class": kind.of_class, "n": len(finished)}
        line |= {outcome: int((finished["outcome"] == outcome).sum()) for outcome in OUTCOMES}
        line["unfinished"] = len(all_of) - len(finished)
        if len(finished):
            line |= {name: int(median([float(v) for v in finished[name]])) for name in ("kept", "served", "refused")}
            if checked == 0:
                line["blocks hit"] = int(finished["hit"].map(lambda text: len(json.loads(text))).sum())
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
