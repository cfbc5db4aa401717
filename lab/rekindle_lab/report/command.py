"""`rekindle-lab report`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rekindle_lab.analysis.runs import load
from rekindle_lab.say import fail


def write(
    runs: Path,
    out: Path | None = None,
    factor: str | None = None,
    alpha: float = 0.05,
    *,
    allow_missing: bool = False,
    allow_versions: bool = False,
) -> Path:
    """Judge runs and write their report; gives the page's path. Raises `ValueError` for runs that cannot be judged."""
    from rekindle_lab.analysis.judge import judge
    from rekindle_lab.report import page

    found = load(runs, factor, allow_missing=allow_missing, allow_versions=allow_versions)
    beside = runs.parent / "order.json"
    order = json.loads(beside.read_text()) if beside.exists() else None
    command = " ".join(
        ["rekindle-lab report", str(runs.name)]
        + ([f"--factor {factor}"] if factor else [])
        + ([f"--alpha {alpha:g}"] if alpha != 0.05 else [])
        + (["--allow-missing"] if allow_missing else [])
        + (["--allow-versions"] if allow_versions else [])
    )
    return page.write(found, judge(found, alpha), (out or runs.parent / "report").resolve(), command, order)


def command(
    runs: Annotated[Path, typer.Argument(help="runs.jsonl of an experiment, or runs.jsonl.gz.")],
    out: Annotated[Path | None, typer.Option(help="Folder, made anew. [default: report beside the runs]")] = None,
    factor: Annotated[str | None, typer.Option(help="Compare levels of this factor. [default: all treatments]")] = None,
    publish: Annotated[
        Path | None, typer.Option(help="Write also a page in Markdown and all raw data into this folder, made anew.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="How often a difference may be seen where there is none.")] = 0.05,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Go on without runs that are not there.")
    ] = False,
    allow_versions: Annotated[
        bool, typer.Option("--allow-versions", help="Go on with runs of several versions.")
    ] = False,
    made_by: Annotated[str, typer.Option(help="For --publish: the command that made the runs.")] = "",
) -> None:
    """Show an experiment: one HTML page that needs nothing else, with PNG and CSV files beside it."""
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
            print(results.publish(runs, publish.resolve(), factor, alpha, made_by, allow=allow))
        except (ValueError, OSError) as error:
            raise fail("report", error, 1) from error
