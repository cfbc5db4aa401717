"""Writes an experiment's HTML page, with PNG and CSV files in its folder, from the lines of the runs alone (`write`).

The page is self-contained: plots and raw data are in it, too. `page.html.jinja` is its template, whose variables are
the arguments of `render`. `start_replacement` and `finish_replacement` replace a folder by a complete new one.
"""

import base64
import csv
import gzip
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from rekindle_lab.analysis import tables
from rekindle_lab.analysis.judge import ResponseResult, Verdict
from rekindle_lab.analysis.runs import Runs, content
from rekindle_lab.report import plots

PAGE = "report.html"


def cell(value: object) -> str:
    """Formats a value for a table."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def attempt_rows(runs: Runs) -> list[dict[str, Any]]:
    """Returns every attempt as a row, whose factors and responses are separate columns."""
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


def write(runs: Runs, verdicts: list[Verdict], folder: Path, *, command: str, order: dict[str, Any] | None) -> Path:
    """Writes page, PNG and CSV files into `folder`, which is replaced; returns the page's path.

    `command`: the command that writes this report, for its reader; `order`: the content of order.json, if it is known.
    An existing folder stays until the new one is complete. Raises `ValueError` if the folder has other content.
    """
    new_folder = start_replacement(folder, PAGE)
    alpha = verdicts[0].alpha
    responses = [_write_response(runs, verdict.response, alpha, new_folder) for verdict in verdicts]
    attempts = attempt_rows(runs)
    attempts_csv = as_csv(attempts)
    (new_folder / "runs.csv").write_text(attempts_csv)
    verdict_rows = tables.verdicts_table(verdicts)
    (new_folder / "verdicts.csv").write_text(as_csv(tables.for_machines(verdict_rows)))
    versions = [{"what": name, "version": version} for name, version in runs.versions.items()]
    page = _template().render(
        runs=runs,
        question=(order or {}).get("question", ""),
        alpha=alpha,
        verdicts=tables.for_people(verdict_rows),
        summary=tables.summary(verdicts),
        responses=responses,
        csv=_base64(attempts_csv.encode()),
        jsonl=_base64(gzip.compress(content(runs.path), mtime=0)),
        lines=attempts,
        command=command,
        versions=versions or [{"what": "", "version": "not known"}],
        definition=json.dumps(order["definition"], indent=1) if order else "",
    )
    (new_folder / PAGE).write_text(page)
    finish_replacement(new_folder, folder)
    return folder / PAGE


def _write_response(runs: Runs, response: ResponseResult, alpha: float, folder: Path) -> dict[str, Any]:
    """Writes the plot and the CSV files of a response; returns the variables of its section of the page."""
    png = folder / f"{response.name}.png"
    plots.draw(runs, response, png)
    tables_by_title = tables.of_response(response, runs.factor, alpha)
    for title, rows in tables_by_title.items():
        csv_path = folder / f"{response.name}-{_file_name(title)}.csv"
        csv_path.write_text(as_csv(tables.for_machines(rows)))
    return {
        "name": response.name,
        "title": tables.heading(response.name),
        "png": _base64(png.read_bytes()),
        "notes": response.notes,
        "tables": {title: tables.for_people(rows) for title, rows in tables_by_title.items()},
    }


def _file_name(title: str) -> str:
    """Returns a title as part of a file name: `Welch's test` is `welch-s-test`; a text in brackets is omitted."""
    without_brackets = title.lower().split(" (")[0]
    return "-".join(re.findall(r"[^\W_]+", without_brackets))


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("rekindle_lab.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["cell"] = cell
    return environment.get_template("page.html.jinja")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def start_replacement(folder: Path, marker: str) -> Path:
    """Makes an empty folder next to `folder`, which `finish_replacement` later puts in its place.

    Raises `ValueError` unless `folder` is missing, empty, or has the file `marker`: then the lab has written it.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / marker).exists():
        raise ValueError(f"{folder}: is not empty and has no {marker}: it would be removed; give another folder")
    new_folder = folder.with_name(folder.name + ".new")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    return new_folder


def finish_replacement(new_folder: Path, folder: Path) -> None:
    """Puts the complete new folder in the place of `folder`, which may exist."""
    if folder.exists():
        old_folder = folder.with_name(folder.name + ".old")
        shutil.rmtree(old_folder, ignore_errors=True)
        folder.rename(old_folder)
        new_folder.rename(folder)
        shutil.rmtree(old_folder)
    else:
        new_folder.rename(folder)
