"""Run a benchmark, or analyse its raw data again.

    python -m rekindle_bench vmm                       measure, analyse, print; the last line is the JSON
    python -m rekindle_bench vmm --from-raw FILE       only analyse and draw
    QUICK=1 python -m rekindle_bench vmm               the same within 8 minutes
    ONLY="sizes memory" python -m rekindle_bench vmm   only these cases
    TRIAL=1 python -m rekindle_bench vmm               check that every case still works; nothing is measured
    TRIAL=1 python -m rekindle_bench all               the same for every topic, three at a time

Exit status 0: everything was measured (a missed bar is in the report and does not fail the benchmark);
1: a case failed: the JSON names it under `failed`, and has the figures of the others; 2: wrong usage, or the machine
cannot run it.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rekindle_bench import cluster, faults, host, libvirt, metrics, move, protect, restore, store, vmm, warm_cache
from rekindle_bench import os as os_reboot
from rekindle_bench import trial as trials
from rekindle_bench.rows import read_sidecar
from rekindle_bench.run import Task, about_name, raw_name
from rekindle_bench.topic import bare_report
from rekindle_lab.machine import find_root, interrupt_on_signals
from rekindle_lab.runs.ledger import LedgerError

TOPICS = {
    package.TOPIC.name: package.TOPIC
    for package in (vmm, protect, restore, store, move, libvirt, warm_cache, faults, os_reboot, host, cluster, metrics)
}

ALL = "all"
"""In place of a topic, selects every topic; only for a trial."""


def refuse(text: str) -> typer.Exit:
    """Prints why the benchmark cannot be run; returns the exit to raise."""
    print(f"bench: {text}", file=sys.stderr)
    return typer.Exit(2)


def main(
    topic: Annotated[str, typer.Argument(help=f"One of: {', '.join(TOPICS)}.")],
    from_raw: Annotated[Path | None, typer.Option(help="Analyse this file of raw rows; measure nothing.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. [default: target/bench]")] = None,
    rekindle: Annotated[Path | None, typer.Option(help="The binary. [default: target/release/rekindle]")] = None,
    qemu: Annotated[str, typer.Option(help="QEMU, 10 or newer for cpr-transfer.")] = "qemu-system-x86_64",
    only: Annotated[list[str] | None, typer.Option(envvar="ONLY", help="Only this case; may be given again.")] = None,
    quick: Annotated[bool, typer.Option(envvar="QUICK", help="Within 8 minutes.")] = False,
    trial: Annotated[
        bool, typer.Option(envvar="TRIAL", help="Only check that every case works: the smallest of each, once.")
    ] = False,
) -> None:
    """Measure Rekindle and its peers in turn."""
    all_topics = topic == ALL and trial
    if topic not in TOPICS and not all_topics:
        raise refuse(f"no topic '{topic}'; there is: {', '.join(TOPICS)}")
    if quick and trial:
        raise refuse("QUICK and TRIAL exclude each other")
    root = find_root(Path.cwd()) or find_root(Path(__file__).resolve())
    if root is None:
        raise refuse("not inside a clone of the project (no parent folder has tests/images/build)")
    folder = (out or root / "target" / "bench" / ("trial" if trial else ".")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if from_raw is not None:
        raise finish(topic, from_raw, folder, command_of(topic, only or [], quick=quick, trial=trial), [])
    cases = [] if all_topics else list(TOPICS[topic].cases)
    unknown = [name for name in only or [] if name not in cases]
    if unknown:
        known_cases = f"there are: {', '.join(cases)}" if cases else "cases are named with a topic"
        raise refuse(f"no case '{unknown[0]}'; {known_cases}")
    binary = (rekindle or root / "target" / ("debug" if trial else "release") / "rekindle").resolve()
    if not binary.exists():
        raise refuse(f"{binary} does not exist; run: cargo build{'' if trial else ' --release'}")
    qemu_path = shutil.which(qemu)
    if qemu_path is None:
        raise refuse(f"no {qemu} in PATH; run: scripts/setup")
    if os.geteuid() != 0:
        raise refuse("needs root, for taps and network namespaces; run it with sudo")
    interrupt_on_signals("bench")
    if all_topics:
        raise typer.Exit(
            1 if trials.run_all(list(trials.PLANS), ["--rekindle", str(binary), "--qemu", qemu_path], folder) else 0
        )
    plans = TOPICS[topic].plans
    plan = trials.PLANS[topic] if trial else plans.QUICK if quick else plans.FULL
    command = command_of(topic, only or [], quick=quick, trial=trial)
    task = Task(
        root=root,
        out=folder,
        binary=binary,
        qemu=qemu_path,
        plan=plan,
        only=only or [],
        command=command,
        trial=trials.trial(topic) if trial else None,
    )
    raise measure(topic, task)


def measure(topic: str, task: Task) -> typer.Exit:
    """Measures a topic, and analyses the rows; returns the exit to raise."""
    errors = []
    try:
        raw = TOPICS[topic].measure(task)
    except LedgerError as error:
        raise refuse(str(error)) from None
    except KeyboardInterrupt:
        print(f"bench: what was measured is in {task.out}; --from-raw analyses it", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:
        raw = task.out / raw_name(topic)
        errors.append(f"{topic}: {type(error).__name__}: {error}")
    return finish(topic, raw, task.out, task.command, errors)


def command_of(topic: str, only: list[str], *, quick: bool, trial: bool) -> str:
    """Returns the command line that repeats this run."""
    words = [f"ONLY='{' '.join(only)}'"] if only else []
    words += ["QUICK=1"] * quick + ["TRIAL=1"] * trial
    return " ".join([*words, "make bench", f"TOPIC={topic}"])


def finish(topic: str, raw: Path, folder: Path, command: str, errors: list[str]) -> typer.Exit:
    """Analyses the rows and prints the report, whose last line is the JSON; returns the exit to raise.

    `errors`: errors of the measurement. A report is printed in any case.
    """
    try:
        report = TOPICS[topic].analyse(raw, folder, command)
    except Exception as error:
        about = read_sidecar(raw, about_name(topic), {})
        report = bare_report(topic, about, command, [f"analysis: {type(error).__name__}: {error}"])
    report.errors[:0] = errors
    print(report.text())
    print(f"\nplots and raw data: {folder}\n")
    print(report.write(folder), flush=True)
    return typer.Exit(1 if report.errors else 0)


if __name__ == "__main__":
    typer.run(main)
