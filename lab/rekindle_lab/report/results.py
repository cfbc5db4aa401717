"""Writes a campaign for `bench/results/`: a Markdown page with all tables, and the raw data for the plots."""

import gzip
import shutil
import statistics
from datetime import UTC, datetime
from pathlib import Path

from rekindle_lab.analysis import tables
from rekindle_lab.analysis.judge import Verdict, judge
from rekindle_lab.analysis.runs import Order, Runs, content, load
from rekindle_lab.experiment.session import duration
from rekindle_lab.report.page import may_replace, replace_folder
from rekindle_lab.tables import pipes

NAME = "results.md"
RAW = "runs.jsonl.gz"


def publish(
    runs: Path, folder: Path, factor: str | None, alpha: float, made_by: str, *, allow: dict[str, bool]
) -> Path:
    """Replaces the folder by a complete new one; returns the page's path.

    Raises `ValueError` if the folder has other content.
    """
    may_replace(folder, NAME)
    found = load(runs, factor, **allow)
    verdicts = judge(found, alpha)
    new_folder = folder.with_name(folder.name + ".new")
    shutil.rmtree(new_folder, ignore_errors=True)
    new_folder.mkdir(parents=True)
    (new_folder / RAW).write_bytes(gzip.compress(content(runs), mtime=0))
    order = runs.parent / "order.json"
    question = ""
    if order.exists():
        shutil.copyfile(order, new_folder / order.name)
        question = Order.load(order).question
    (new_folder / NAME).write_text(markdown(found, verdicts, question, made_by))
    replace_folder(new_folder, folder)
    return folder / NAME


def markdown(runs: Runs, verdicts: list[Verdict], question: str, made_by: str) -> str:
    """Formats the page. No figure of the page is written by hand."""
    made = ", ".join(f"{name} {version}" for name, version in runs.versions.items())
    by = f"Made by `{made_by}`, on" if made_by else "Made on"
    parts = [f"# Campaign `{runs.experiment}`: measured", question, f"{by}: {made or 'not known'}.", _how_many(runs)]
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
    parts += [f"Plots, by level and in the order of the runs: `rekindle-lab report {RAW} --out page`."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(level: str, title: str) -> str:
    like = tables.LIKE_THE_PAPERS.get(title)
    return f"{level} {title}" + (f", as the paper's tables {like}" if like else "")


def _how_many(runs: Runs) -> str:
    """Describes the number of runs of each level, and their duration."""
    counts = {level: sum(run.level == level for run in runs.done) for level in runs.levels}
    each = ", ".join(f"{level} {count}" for level, count in counts.items())
    text = f"{len(runs.done)} of {runs.planned} runs done ({each}), {len(runs.failed)} failed attempts."
    took = [line["took_s"] for line in runs.lines if isinstance(line.get("took_s"), int | float)]
    began = [line["began_unix_s"] for line in runs.lines if isinstance(line.get("began_unix_s"), int | float)]
    if took and began:
        first, last = (f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" for at in (min(began), max(began)))
        text += f" A run took {duration(statistics.median(took))} (median), all together {duration(sum(took))};"
        text += f" the first began {first}, the last {last} UTC."
    return text
