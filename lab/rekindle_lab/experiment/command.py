"""The command `rekindle-lab experiment`: shows the order of an experiment, or executes its runs and reports them.

An experiment has factors with levels, and measures responses. A treatment is one level of each factor; each treatment
is repeated in several runs. The order of the runs is drawn at random once and written to disk ("committed") before the
first run. Another start with the same folder continues after the last finished run.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rekindle_lab.failure import fail
from rekindle_lab.machine import cache, find_root, interrupt_on_signals

if TYPE_CHECKING:
    from rekindle_lab.experiment.definition import Experiment
    from rekindle_lab.experiment.runner import Runner

KEY_DIGITS = 6
"""Hexadecimal digits of the key in the names of network namespaces. It distinguishes the experiments of a machine."""
EXIT_INTERRUPTED = 130
"""Exit status after SIGINT, as shells report it."""


def command(
    file: Annotated[Path, typer.Argument(help="The experiment: factors, levels, responses (TOML).")],
    out: Annotated[Path | None, typer.Option(help="Folder of its runs. [default: NAME next to the file]")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only draw and show the order; run nothing.")] = False,
    most: Annotated[int | None, typer.Option(min=1, help="Do at most this many runs.")] = None,
    trial: Annotated[int | None, typer.Option(min=1, help="Trial: this many runs per treatment.")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Repeat failed runs.")] = False,
    rekindle: Annotated[Path | None, typer.Option(help="The binary. [default: target/release/rekindle]")] = None,
    qemu: Annotated[str, typer.Option(help="QEMU, for guests.")] = "qemu-system-x86_64",
    report: Annotated[bool, typer.Option(help="Analyse and write the report when all runs are done.")] = True,
) -> None:
    """Run a designed experiment: a random order, committed before the first run; a line on disk for each run.

    It may be killed at any moment: started again it continues, and no run is lost or done twice. Exit status 0: all
    runs are done; 1: some failed or are left; 2: the definition or the machine is unsuitable.
    """
    # Imported here, so that other commands and --help do not wait for numpy and the guests' modules.
    from rekindle_lab.experiment import order as orders
    from rekindle_lab.experiment.definition import load
    from rekindle_lab.experiment.runner import RunError
    from rekindle_lab.experiment.session import ORDER, ExperimentSession, ExperimentStoppedError
    from rekindle_lab.experiment.settings import check
    from rekindle_lab.runs.ledger import RUNS, LedgerError
    from rekindle_lab.toml import DefinitionError

    try:
        experiment = load(file, trial)
        name = experiment.name if trial is None else f"{experiment.name}-trial"
        folder = (out or file.parent / name).resolve()
        if experiment.runner == "guest":
            check(experiment)
        if show:
            folder.mkdir(parents=True, exist_ok=True)
            order = orders.commit(experiment, folder / ORDER)
            for planned in order.runs:
                print(json.dumps({"run": planned.run, "block": planned.block, "treatment": planned.treatment}))
            return
    except (DefinitionError, orders.OrderError, OSError) as error:
        raise fail("experiment", error) from error
    runner, versions = _make_runner(experiment, file, folder, rekindle, qemu)
    interrupt_on_signals("experiment")
    try:
        runs_left = ExperimentSession(experiment, folder, runner, versions).run(retry_failed=retry_failed, most=most)
    except KeyboardInterrupt:
        raise fail(
            "experiment", f"interrupted; {folder} has the finished runs, start again to continue", EXIT_INTERRUPTED
        ) from None
    except (orders.OrderError, DefinitionError) as error:
        raise fail("experiment", error) from error
    except (ExperimentStoppedError, LedgerError, RunError, OSError, subprocess.SubprocessError) as error:
        raise fail("experiment", error, 1) from error
    if runs_left:
        raise fail("experiment", f"{runs_left} runs are not done; {folder / RUNS} has the others", 1)
    if report and experiment.replications > 1:  # one run per treatment cannot be analysed
        _write_report(folder / RUNS)


def _write_report(runs: Path) -> None:
    from rekindle_lab.report.command import write

    try:
        print(write(runs))
    except ValueError as error:
        raise fail("experiment", error, 1) from error


class _RunnerWithVersions(NamedTuple):
    """What executes the runs, and the versions of everything that takes part in them."""

    runner: "Runner"
    versions: dict[str, str]


def _make_runner(
    experiment: "Experiment", file: Path, folder: Path, rekindle: Path | None, qemu: str
) -> _RunnerWithVersions:
    from rekindle_lab.experiment.guest import GuestRunner
    from rekindle_lab.experiment.runner import CommandRunner

    if experiment.runner == "command":
        return _RunnerWithVersions(CommandRunner(experiment, file.resolve().parent), {})
    installation = _find_installation(rekindle, qemu)
    runner = GuestRunner(
        experiment,
        root=installation.root,
        binary=installation.rekindle,
        qemu=installation.qemu,
        disk=cache() / "lab",
        key=hashlib.sha256(str(folder).encode()).hexdigest()[:KEY_DIGITS],
    )
    return _RunnerWithVersions(runner, runner.versions())


class _Installation(NamedTuple):
    """What a run with a guest needs on this machine."""

    root: Path
    """Folder of the project."""
    rekindle: Path
    """The binary."""
    qemu: str
    """Path of the QEMU binary."""


def _find_installation(rekindle: Path | None, qemu: str) -> _Installation:
    """Finds the project, Rekindle and QEMU; raises `typer.Exit` with a remedy if something is missing."""
    root = find_root(Path.cwd()) or find_root(Path(__file__).resolve())
    if root is None:
        raise fail("experiment", "not inside a clone of the project (no parent folder has tests/images/build)")
    binary = (rekindle or root / "target" / "release" / "rekindle").resolve()
    if not binary.exists():
        raise fail("experiment", f"{binary} does not exist; run: make build")
    qemu_path = shutil.which(qemu)
    if qemu_path is None:
        raise fail("experiment", f"no {qemu} in PATH; run: scripts/setup")
    if os.geteuid() != 0:
        raise fail("experiment", "guests need root, for taps and network namespaces; run it with sudo")
    return _Installation(root, binary, qemu_path)
