"""Writes the results of a campaign for `lab/results/campaigns`: a Markdown page with all tables, and the raw data.

A campaign is one of our experiments (lab/campaigns). Entry point: `publish`. No figure of the page is written by hand.
"""

import gzip
import shutil
import statistics
from datetime import UTC, datetime
from pathlib import Path

from rekindle_lab.analysis import tables
from rekindle_lab.analysis.judge import Verdict, judge
from rekindle_lab.analysis.runs import Order, Runs, content, load
from rekindle_lab.experiment.session import duration
from rekindle_lab.report.page import finish_replacement, start_replacement
from rekindle_lab.tables import pipes

PAGE = "results.md"
RAW_DATA = "runs.jsonl.gz"


def publish(
    runs: Path, folder: Path, *, factor: str | None, alpha: float, made_by: str, allow: dict[str, bool]
) -> Path:
    """Replaces the folder by a complete new one; returns the page's path.

    `made_by`: the command that made the runs; `allow`: `allow_missing` and `allow_versions` of `load`. Raises
    `ValueError` if the folder has other content.
    """
    checked_runs = load(runs, factor, **allow)
    verdicts = judge(checked_runs, alpha)
    new_folder = start_replacement(folder, PAGE)
    (new_folder / RAW_DATA).write_bytes(gzip.compress(content(runs), mtime=0))
    order_path = runs.parent / "order.json"
    question = ""
    if order_path.exists():
        shutil.copyfile(order_path, new_folder / order_path.name)
        question = Order.load(order_path).question
    (new_folder / PAGE).write_text(markdown(checked_runs, verdicts, question, made_by))
    finish_replacement(new_folder, folder)
    return folder / PAGE


def markdown(runs: Runs, verdicts: list[Verdict], question: str, made_by: str) -> str:
    """Formats the page: the runs, the verdicts and averages of all responses, then the tables of each."""
    versions = ", ".join(f"{name} {version}" for name, version in runs.versions.items())
    origin = f"Made by `{made_by}`, on" if made_by else "Made on"
    parts = [f"# Campaign `{runs.experiment}`: measured", question]
    parts += [f"{origin}: {versions or 'not known'}.", _describe_runs(runs)]
    parts += ["## Does it differ?", pipes(tables.for_people(tables.verdicts_table(verdicts)))]
    parts += [_heading("##", "Averages"), pipes(tables.summary(verdicts))]
    for verdict in verdicts:
        response = verdict.response
        title = tables.heading(response.name)
        parts += [f"## {title}"]
        for name, rows in tables.of_response(response, runs.factor, verdict.alpha).items():
            parts += [_heading("###", name), pipes(tables.for_people(rows))]
        parts += [f"- {note}" for note in response.notes]
    parts += [f"- {note}" for note in runs.notes]
    parts += [f"Plots, by level and in the order of the runs: `rekindle-lab report {RAW_DATA} --out page`."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(level: str, title: str) -> str:
    papers_tables = tables.LIKE_THE_PAPERS.get(title)
    return f"{level} {title}" + (f", as the paper's tables {papers_tables}" if papers_tables else "")


def _describe_runs(runs: Runs) -> str:
    """Describes the number of runs of each level, and their duration."""
    counts = {level: sum(run.level == level for run in runs.done) for level in runs.levels}
    per_level = ", ".join(f"{level} {count}" for level, count in counts.items())
    text = f"{len(runs.done)} of {runs.planned} runs done ({per_level}), {len(runs.failed)} failed attempts."
    durations_s = [line["took_s"] for line in runs.lines if isinstance(line.get("took_s"), int | float)]
    starts_unix_s = [line["began_unix_s"] for line in runs.lines if isinstance(line.get("began_unix_s"), int | float)]
    if durations_s and starts_unix_s:
        first, last = (
            f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M}"
            for unix_s in (min(starts_unix_s), max(starts_unix_s))
        )
        usual, total = duration(statistics.median(durations_s)), duration(sum(durations_s))
        text += f" A run took {usual} (median), all together {total};"
        text += f" the first began {first}, the last {last} UTC."
    return text
