"""Computes the figures and tables of an object store from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each commit, PUT, restore and race; `rows.Row` documents its columns.
"""

import json

import pandas as pd

from rekindle_bench.report import Bar, Contrast, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, pick, seconds
from rekindle_lab.stats import median, p95

from .rows import STORES


def _took_ms(label: str, frame: pd.DataFrame, case: str, how: str) -> Sample:
    return Sample(label, milliseconds(pick(frame, "took_us", case=case, how=how)))


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    findings.add_ratio(
        "s3_commit_vs_dir",
        Bar(1.3),
        ours=_took_ms("commit of a checkpoint", frame, "commit", "s3"),
        peer=_took_ms("PUT of as many bytes", frame, "commit", "put"),
    )
    objects = _took_ms("from the object store", frame, "restore", "s3")
    server = _took_ms("from `rekindle store serve` over TLS", frame, "restore", "tls")
    if objects.values and server.values:
        contrast = Contrast.of(objects, server, "ms", with_peer=False)
        findings.add("s3_restore", objects.values, "ms", Bar(150.0), contrast=contrast, ratio_bar=Bar(2.0))
    elif objects.values:
        findings.add("s3_restore", objects.values, "ms", Bar(150.0))
    else:
        findings.report_missing("s3_restore")
    _owners(frame, findings)
    return findings


def _owners(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the number of races after which not exactly one host was the owner, or an error leaves that unknown."""
    races = matching(frame, case="owners")
    if not len(races):
        findings.report_missing("s3_owners")
        return
    wrong = [float(owners != 1) for owners in races["owners"]]
    errors = int((races["error"].fillna("") != "").sum())
    findings.add("s3_owners", wrong, "", Bar(0.0), value=sum(wrong), extra={"errors": float(errors)})


def commits(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists commits and PUTs."""
    return [
        {
            "way": how,
            "n": len(group),
            "MB": median(pick(group, "bytes")) / 1e6,
            "ms": median(milliseconds(pick(group, "took_us"))),
            "p95": p95(milliseconds(pick(group, "took_us"))),
        }
        for how, group in matching(frame, case="commit").groupby("how", sort=True)
    ]


def restores(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists restores by kind of store, with the medians of their steps."""
    lines: list[dict[str, object]] = []
    for how in STORES:
        group = matching(frame, case="restore", how=how)
        if not len(group):
            continue
        steps_ms: dict[str, list[float]] = {}
        for text in group["steps"].dropna():
            for step in json.loads(text):
                if step.get("phase") != "settle":
                    steps_ms.setdefault(step["step"], []).append(step["us"] / 1e3)
        lines.append(
            {
                "store": how,
                "n": len(group),
                "running after ms": median(milliseconds(pick(group, "took_us"))),
                "p95": p95(milliseconds(pick(group, "took_us"))),
                "all memory after s": median_or_none(seconds(pick(group, "fill_us"))),
                "longest wait ms": median_or_none(milliseconds(pick(group, "worst_us"))),
                **{f"{name} ms": median(values) for name, values in steps_ms.items()},
            }
        )
    return lines


def races(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists races by kind, with how many owners they had."""
    return [
        {
            "race": how,
            "n": len(group),
            "two owners": int((group["owners"] > 1).sum()),
            "no owner": int((group["owners"] < 1).sum()),
            "unknown": int(group["owners"].isna().sum()),
            "errors": int((group["error"].fillna("") != "").sum()),
            "ms": median(milliseconds(pick(group, "took_us"))),
        }
        for how, group in matching(frame, case="owners").groupby("how", sort=True)
    ]
