"""Measuring and analysing, one after the other or each by itself."""

import json
import os
import shutil
import time
from pathlib import Path

from rekindle_lab import guests
from rekindle_lab.bench.report import Report, machine_versions, qemu_version
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.rekindle import Rekindle

from . import analysis, plots, rows
from .cases import CASES
from .plan import FULL, QUICK, Plan, left_out
from .stage import NoRoomError, Stage, stage

TOPIC = "vmm"
RAW = "vmm-raw.csv"
RECORDS = "vmm-breakdown.json"
ABOUT = "vmm-run.json"
"""What the raw rows do not say: versions, what was left out, what went wrong."""


def measure(root: Path, out: Path, binary: Path, qemu: str, *, quick: bool, only: list[str], command: str) -> Path:
    """Run the cases and write the raw files into `out`; gives the file of rows."""
    plan = QUICK if quick else FULL
    raw = out / RAW
    file = RowFile(raw, rows.Row)
    cache = Path(os.environ.get("REKINDLE_CACHE") or Path.home() / ".cache" / "rekindle")
    versions = {
        "rekindle": Rekindle(binary, out).version(),
        "qemu": qemu_version(qemu),
        **machine_versions(),
    }
    for kind in ("micro", "debian"):
        guests.build(root, kind)  # now, so that it is not in the time of a quick run
    here: Stage | None = None
    skipped = [f"case {name}: not asked for" for name in CASES if only and name not in only]
    try:
        with stage(root, binary, qemu, file, cache) as here:
            for name in CASES:
                if not only or name in only:
                    run_case(here, name, plan)
    finally:
        file.close()
        about = {
            "command": command,
            "versions": versions,
            "left_out": left_out(plan) + skipped + (here.left_out if here else []),
            "errors": here.errors if here else [],
        }
        (out / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        (out / RECORDS).write_text(json.dumps(here.records if here else []) + "\n")
    return raw


def run_case(here: Stage, name: str, plan: Plan) -> None:
    """Run one case; what goes wrong in it is written down, and the next one gets its turn."""
    if plan.budget_s is not None and time.monotonic() - here.began > plan.budget_s:
        here.left_out.append(f"case {name}: no time left for it")
        return
    try:
        CASES[name](here, plan)
    except NoRoomError as error:
        here.left_out.append(f"case {name}: the machine {error}")
    except Exception as error:
        here.errors.append(f"case {name}: {type(error).__name__}: {error}")
        here.say(here.errors[-1])


def analyse(raw: Path, out: Path, command: str) -> Report:
    """Figures, tables and plots from a file of rows and, where they are, the files that were written beside it."""
    frame = rows.read(raw)
    about = _beside(raw, ABOUT, {})
    records = _beside(raw, RECORDS, [])
    if raw.resolve() != (out / RAW).resolve():
        for name in (ABOUT, RECORDS):
            if (raw.parent / name).exists():
                shutil.copyfile(raw.parent / name, out / name)
        shutil.copyfile(raw, out / RAW)
    found, absent = analysis.figures(frame, RAW)
    return Report(
        topic=TOPIC,
        command=about.get("command", command),
        versions=about.get("versions", {}),
        figures=found,
        left_out=[*about.get("left_out", []), *absent],
        errors=about.get("errors", []),
        plots=plots.draw(frame, records, out),
        tables={
            "Guest-stopped time and service gap": analysis.summary(frame),
            "Warm against cpr-transfer (medians; ratio with its 95% interval)": analysis.versus_cpr(frame),
        },
    )


def _beside(raw: Path, name: str, default: object) -> object:
    path = raw.parent / name
    return json.loads(path.read_text()) if path.exists() else default
