"""The command `rekindle-lab report`: writes the HTML page of an experiment (`write`) and publishes it as Markdown."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rekindle_lab.analysis.runs import load
from rekindle_lab.failure import fail


def write(
    runs: Path,
    out: Path | None = None,
    factor: str | None = None,
    alpha: float = 0.05,
    *,
    allow_missing: bool = False,
    allow_versions: bool = False,
) -> Path:
    """Analyses runs and writes their report; returns the page's path. Raises `ValueError` for unusable runs."""
    from rekindle_lab.analysis.judge import ALPHA, judge
    from rekindle_lab.report import page

    checked_runs = load(runs, factor, allow_missing=allow_missing, allow_versions=allow_versions)
    order_path = runs.parent / "order.json"
    order = json.loads(order_path.read_text()) if order_path.exists() else None
    options = {
        f"--factor {factor}": factor,
        f"--alpha {alpha:g}": alpha != ALPHA,
        "--allow-missing": allow_missing,
        "--allow-versions": allow_versions,
    }
    command = " ".join(["rekindle-lab report", runs.name, *(option for option, is_set in options.items() if is_set)])
    folder = (out or runs.parent / "report").resolve()
    return page.write(checked_runs, judge(checked_runs, alpha), folder, command=command, order=order)


def command(
    runs: Annotated[Path, typer.Argument(help="runs.jsonl of an experiment, or runs.jsonl.gz.")],
    out: Annotated[Path | None, typer.Option(help="Folder; replaced. [default: report next to the runs]")] = None,
    factor: Annotated[str | None, typer.Option(help="Compare levels of this factor. [default: all treatments]")] = None,
    publish: Annotated[
        Path | None, typer.Option(help="Also write a Markdown page and all raw data into this folder; replaced.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="Accepted probability of a false difference.")] = 0.05,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="Report although runs are missing.")] = False,
    allow_versions: Annotated[
        bool, typer.Option("--allow-versions", help="Report although runs are of several versions.")
    ] = False,
    made_by: Annotated[str, typer.Option(help="For --publish: the command that made the runs.")] = "",
) -> None:
    """Report an experiment: one self-contained HTML page, with PNG and CSV files in the same folder."""
    if not 0 < alpha < 1:
        raise fail("report", f"--alpha {alpha:g}: it must be between 0 and 1")
    allow = {"allow_missing": allow_missing, "allow_versions": allow_versions}
    try:
        path = write(runs, out, factor, alpha, **allow)
    except ValueError as error:
        raise fail("report", error) from error
    except OSError as error:
        raise fail("report", error, 1) from error
    print(path)
    if publish is not None:
        from rekindle_lab.report import results

        try:
            print(results.publish(runs, publish.resolve(), factor=factor, alpha=alpha, made_by=made_by, allow=allow))
        except (ValueError, OSError) as error:
            raise fail("report", error, 1) from error
