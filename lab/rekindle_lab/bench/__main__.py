"""Run a benchmark, or analyse its raw data again.

    python -m rekindle_lab.bench vmm                       measure, analyse, print; the last line is the JSON
    python -m rekindle_lab.bench vmm --from-raw FILE       only analyse and draw
    QUICK=1 python -m rekindle_lab.bench vmm               the same within 8 minutes
    ONLY="sizes memory" python -m rekindle_lab.bench vmm   only these cases

Exit status 0: everything was measured (a bar that is missed is said in the report, and is no failure of the benchmark);
1: a case failed, the others are reported; 2: wrong usage, or the machine cannot run it.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rekindle_lab.bench import cluster, faults, host, move, protect, restore, vmm, warm_cache
from rekindle_lab.bench import os as os_reboot
from rekindle_lab.bench.stage import taken_down_on_signals

TOPICS = {
    "vmm": vmm,
    "protect": protect,
    "restore": restore,
    "move": move,
    "warm-cache": warm_cache,
    "faults": faults,
    "os": os_reboot,
    "host": host,
    "cluster": cluster,
}


def find_root(start: Path) -> Path | None:
    """The folder of the project: the nearest one upwards that has guest/build."""
    return next((folder for folder in [start, *start.parents] if (folder / "guest" / "build").exists()), None)


def refuse(text: str) -> typer.Exit:
    """Say why it cannot be run."""
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
) -> None:
    """Measure ours and its peers in turn."""
    if topic not in TOPICS:
        raise refuse(f"no topic '{topic}'; there is: {', '.join(TOPICS)}")
    chosen = TOPICS[topic]
    root = find_root(Path.cwd()) or find_root(Path(__file__).resolve())
    if root is None:
        raise refuse("not inside a clone of the project (no guest/build upwards)")
    folder = (out or root / "target" / "bench").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    command = f"make bench TOPIC={topic}"
    if only:
        command = f"ONLY='{' '.join(only)}' {command}"
    if quick:
        command = f"QUICK=1 {command}"
    if from_raw is None:
        unknown = [name for name in only or [] if name not in chosen.CASES]
        if unknown:
            raise refuse(f"no case '{unknown[0]}'; there are: {', '.join(chosen.CASES)}")
        binary = (rekindle or root / "target" / "release" / "rekindle").resolve()
        if not binary.exists():
            raise refuse(f"{binary} is not there; run: cargo build --release")
        found = shutil.which(qemu)
        if found is None:
            raise refuse(f"no {qemu} in PATH; run: scripts/setup")
        if os.geteuid() != 0:
            raise refuse("needs root, for taps and network namespaces; run it with sudo")
        taken_down_on_signals("bench")
        try:
            from_raw = chosen.measure(root, folder, binary, found, quick=quick, only=only or [], command=command)
        except KeyboardInterrupt:
            print(f"bench: what was measured is in {folder}; --from-raw analyses it", file=sys.stderr)
            raise typer.Exit(130) from None
    report = chosen.analyse(from_raw, folder, command)
    print(report.text())
    print(f"\nplots and raw data: {folder}\n")
    print(report.write(folder))
    raise typer.Exit(1 if report.errors else 0)


if __name__ == "__main__":
    typer.run(main)
