"""Writes the page and the files in its folder, from the lines of the runs alone."""

import base64
import csv
import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rekindle_lab.analysis import tables
from rekindle_lab.analysis.judge import Verdict
from rekindle_lab.analysis.runs import Runs, content
from rekindle_lab.report import plots

PAGE = "report.html"


def cell(value: object) -> str:
    """Formats a value for a table."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def flat(runs: Runs) -> list[dict[str, Any]]:
    """Returns every attempt as a row: factors and responses are separate columns, with their units."""
    factors = list(dict.fromkeys(name for line in runs.lines for name in line["treatment"]))
    return [
        {
            "run": line["run"],
            "block": line["block"],
            "attempt": line["attempt"],
            **{name: line["treatment"].get(name) for name in factors},
            "outcome": line["outcome"],
            "exit_status": line.get("exit_status", 0),
            "took_s": line.get("took_s"),
            **{name: line["responses"].get(name) for name in runs.responses},
            "error": line.get("error"),
        }
        for line in runs.lines
    ]


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Formats rows as CSV, numbers with all their digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write(runs: Runs, verdicts: list[Verdict], folder: Path, command: str, order: dict[str, Any] | None) -> Path:
    """Writes page, PNG and CSV files into `folder`, which is replaced; returns the page's path.

    An existing folder stays until the new one is complete. Raises `ValueError` if the folder has other content.
    """
    may_replace(folder, PAGE)
    new_folder = folder.with_name(folder.name + ".new")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    alpha = verdicts[0].alpha
    responses = []
    for verdict in verdicts:
        response = verdict.response
        png = new_folder / f"{response.name}.png"
        plots.draw(runs, response, png)
        found = tables.of_response(response, runs.factor, alpha)
        for title, rows in found.items():
            words = "-".join("".join(c if c.isalnum() else " " for c in title.lower().split(" (")[0]).split())
            (new_folder / f"{response.name}-{words}.csv").write_text(as_csv(tables.for_machines(rows)))
        responses.append(
            {
                "name": response.name,
                "title": tables.heading(response.name),
                "png": base64.b64encode(png.read_bytes()).decode(),
                "notes": response.notes,
                "tables": {title: tables.for_people(rows) for title, rows in found.items()},
            }
        )
    lines = flat(runs)
    rows_csv = as_csv(lines)
    glance = tables.verdicts_table(verdicts)
    (new_folder / "runs.csv").write_text(rows_csv)
    (new_folder / "verdicts.csv").write_text(as_csv(tables.for_machines(glance)))
    environment = Environment(
        loader=PackageLoader("rekindle_lab.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["cell"] = cell
    page = environment.get_template("page.html.jinja").render(
        runs=runs,
        question=(order or {}).get("question", ""),
        alpha=alpha,
        verdicts=tables.for_people(glance),
        summary=tables.summary(verdicts),
        responses=responses,
        csv=base64.b64encode(rows_csv.encode()).decode(),
        jsonl=base64.b64encode(gzip.compress(content(runs.path), mtime=0)).decode(),
        lines=lines,
        command=command,
        versions=[{"what": name, "version": version} for name, version in runs.versions.items()]
        or [{"what": "", "version": "not known"}],
        definition=json.dumps(order["definition"], indent=1) if order else "",
    )
    (new_folder / PAGE).write_text(page)
    replace_folder(new_folder, folder)
    return folder / PAGE


def may_replace(folder: Path, mark: str) -> None:
    """Raises `ValueError` unless a folder is missing, empty, or has the file `mark`: then the lab has written it."""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise ValueError(f"{folder}: is not empty and has no {mark}: it would be removed; give another folder")


def replace_folder(new: Path, folder: Path) -> None:
    """Replaces a folder, if it exists, by a complete new one."""
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)
    else:
        new.rename(folder)
