"""The command `rekindle-lab analyse`: prints the judgement of an experiment's runs, as text or as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle_lab.failure import fail
from rekindle_lab.numbers import for_json
from rekindle_lab.tables import table

if TYPE_CHECKING:  # scipy and statsmodels take a second to load, which would slow down `--help`
    from rekindle_lab.analysis.judge import Verdict
    from rekindle_lab.analysis.runs import Runs


def as_json(runs: "Runs", verdicts: "list[Verdict]") -> dict[str, Any]:
    """Returns all results as JSON."""
    document = {
        "experiment": runs.experiment,
        "factor": runs.factor,
        "planned": runs.planned,
        "done": len(runs.done),
        "failed": len(runs.failed),
        "versions": runs.versions,
        "notes": runs.notes,
        "responses": [
            asdict(verdict.response)
            | {"p_bonferroni": verdict.p_bonferroni, "p_holm": verdict.p_holm, "differs": verdict.differs}
            for verdict in verdicts
        ],
    }
    return for_json(document)


def text(runs: "Runs", verdicts: "list[Verdict]", alpha: float) -> str:
    """Formats the results for the terminal."""
    from rekindle_lab.analysis import tables

    parts = [
        f"{runs.experiment}: {len(runs.done)} of {runs.planned} runs done, {len(runs.failed)} failed attempts",
        table(tables.for_people(tables.verdicts_table(verdicts)), "Responses"),
        table(tables.summary(verdicts), "Averages"),
    ]
    for verdict in verdicts:
        response = verdict.response
        title = tables.heading(response.name)
        parts += [
            table(tables.for_people(rows), f"{title}: {name}")
            for name, rows in tables.of_response(response, runs.factor, alpha).items()
        ]
        parts += [f"{title}: {note}" for note in response.notes]
    parts += [f"note: {note}" for note in runs.notes]
    return "\n\n".join(parts)


def paper_table() -> str:
    """Recomputes the numbers of the paper, and formats them as a table."""
    from rekindle_lab.analysis import paper

    rows = [
        {
            "table": row.table,
            "what": row.what,
            "printed": row.printed,
            "its figures give": str(row.computed),
            "": "agrees" if row.agrees else "PARTS",
        }
        for row in paper.rows()
    ]
    return table(rows, "Towards Fast OS Rejuvenation: its numbers from its numbers")


def command(
    runs: Annotated[Path | None, typer.Argument(help="runs.jsonl of an experiment, or runs.jsonl.gz.")] = None,
    factor: Annotated[str | None, typer.Option(help="Compare levels of this factor. [default: all treatments]")] = None,
    alpha: Annotated[float, typer.Option(help="Accepted probability of a false difference.")] = 0.05,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="Analyse although runs are missing.")] = False,
    allow_versions: Annotated[
        bool, typer.Option("--allow-versions", help="Analyse although runs are of several versions.")
    ] = False,
    json_out: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    paper: Annotated[bool, typer.Option("--paper", help="Compute the evaluation paper's own tables again.")] = False,
) -> None:
    """Test whether treatments differ, in which responses, and by how much.

    One-way analysis of variance or, where variances differ, Welch's test; corrected for the number of responses; with
    effect sizes, bootstrap intervals and a permutation test as a cross-check.
    """
    if paper:
        print(paper_table())
        return
    if runs is None:
        raise fail("analyse", "no runs given; name runs.jsonl of an experiment, or use --paper")
    if not 0 < alpha < 1:
        raise fail("analyse", f"--alpha {alpha:g}: it must be between 0 and 1")
    from rekindle_lab.analysis.judge import judge
    from rekindle_lab.analysis.runs import load

    try:
        checked_runs = load(runs, factor, allow_missing=allow_missing, allow_versions=allow_versions)
    except ValueError as error:
        raise fail("analyse", error) from error
    verdicts = judge(checked_runs, alpha)
    print(json.dumps(as_json(checked_runs, verdicts)) if json_out else text(checked_runs, verdicts, alpha))
