"""Reads measured downtimes for a plan: the table `[measured]` of its TOML file.

- `vmm`: the JSON of `make bench TOPIC=vmm`, and `vmm_guests`, which of its rows.
  Without `os`, `os_guests` names the rows whose cold gap is that of an OS reboot.
- `os`: the runs of an experiment that has the response `downtime_s` and whose levels are named as the ways of
  `rekindle reboot os` (the campaign `overhead`); or the JSON of `make bench TOPIC=os`, and `os_guests`.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from rekindle_lab.analysis.runs import load
from rekindle_lab.models.parameters import OsReboot, Technique, measured
from rekindle_lab.rekindle import OS_WAYS, VMM_WAYS
from rekindle_lab.toml import DefinitionError, known, text

KEYS = ("vmm", "vmm_guests", "os", "os_guests")
OS_TABLE = "Downtime as a client sees it (s, medians)"
"""The table of `make bench TOPIC=os`."""


def techniques(
    table: dict[str, Any], folder: Path
) -> tuple[dict[str, Technique], dict[str, OsReboot], tuple[str, ...]]:
    """Returns techniques for the VMM and for the OS, and notes. Paths are relative to `folder`."""
    known(table, KEYS, "measured")
    vmm: dict[str, Technique] = {}
    os: dict[str, OsReboot] = {}
    notes = []
    if "vmm" in table:
        path = folder / text(table, "vmm")
        whose = text(table, "os_guests") if "os" not in table and "os_guests" in table else None
        found = measured(path, text(table, "vmm_guests"), whose, None if whose else 0.0)
        # Peers that were measured with it are not part of a plan.
        vmm = {name: one for name, one in found.techniques.items() if name in VMM_WAYS}
        if whose:
            os = {"cold": found.os}
            notes.append(f"OS: the cold service gap of {whose} ({path.name}); degradation is taken as 0")
        notes.append(f"VMM: median service gaps of {table['vmm_guests']} ({path.name}); degradation is taken as 0")
    if "os" in table:
        path = folder / text(table, "os")
        downtimes, what = _of_topic(path, text(table, "os_guests")) if path.suffix == ".json" else _of_runs(path)
        os = {name: OsReboot(seconds) for name, seconds in downtimes.items()}
        notes.append(f"OS: {what} ({path.name}); degradation is taken as 0")
    return vmm, os, tuple(notes)


def _of_runs(path: Path) -> tuple[dict[str, float], str]:
    """Returns mean downtimes of an experiment's levels."""
    try:
        runs = load(path, None, allow_missing=False, allow_versions=False)
    except ValueError as error:
        raise DefinitionError(f"measured.os: {error}") from error
    if "downtime_s" not in runs.responses:
        raise DefinitionError(f"measured.os: {path} has no response downtime_s; it has: {', '.join(runs.responses)}")
    strange = next((level for level in runs.levels if level not in OS_WAYS), None)
    if strange is not None:
        raise DefinitionError(
            f"measured.os: {path}: level '{strange}' is no way to reboot an OS; there are: {', '.join(OS_WAYS)}"
        )
    levels = {level: [run.responses["downtime_s"] for run in runs.done if run.level == level] for level in runs.levels}
    least = min(len(values) for values in levels.values())
    return {
        level: fmean(values) for level, values in levels.items()
    }, f"mean downtimes of {least} or more runs per level"


def _of_topic(path: Path, guests: str) -> tuple[dict[str, float], str]:
    """Returns median downtimes of one guest; of its phases the latest, which is listed last."""
    try:
        rows = json.loads(path.read_text())["tables"][OS_TABLE]
        found = [
            (row["guest"], row["reboot"].split("-kernel")[0].split("-services")[0], row["downtime"]) for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DefinitionError(f"measured.os: {path}: not the JSON of `make bench TOPIC=os`: {error!r}") from error
    own = {how: seconds for guest, how, seconds in found if guest == guests and how in OS_WAYS}
    if not own:
        names = ", ".join(dict.fromkeys(guest for guest, _, _ in found))
        raise DefinitionError(f"measured.os_guests: no '{guests}' in {path}; there are: {names}")
    return own, f"median downtimes of {guests}"
