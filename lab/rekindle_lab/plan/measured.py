"""Reads measured downtimes for a plan: the table `[measured]` of its TOML file.

- `vmm`: the JSON of `make bench TOPIC=vmm`; `vmm_guests` selects its rows.
  Without `os`, `os_guests` names the rows whose cold gap is that of an OS reboot.
- `os`: the runs of an experiment that has the response `downtime_s` and whose levels are named as the ways of
  `rekindle reboot` (the campaign `overhead`); or the JSON of `make bench TOPIC=os`, with `os_guests`.

None of these files has a degradation: degradations are taken as 0, and a note reports that.

A way is a value of `--how` of `rekindle replace-qemu` (`VMM_WAYS`) or `rekindle reboot` (`OS_WAYS`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rekindle_lab.analysis.runs import load
from rekindle_lab.models.parameters import OsReboot, Technique, measured
from rekindle_lab.rekindle import OS_WAYS, VMM_WAYS
from rekindle_lab.toml import DefinitionError, known, text

KEYS = ("vmm", "vmm_guests", "os", "os_guests")
OS_TABLE = "Downtime as a client sees it (s, medians)"
"""Title of the table of `make bench TOPIC=os` that is read. Columns: `guest`, `reboot` (the way), `downtime` in s."""


@dataclass(frozen=True)
class MeasuredWays:
    """The ways to renew that were measured, by name. `notes`: sources of their downtimes."""

    vmm: dict[str, Technique]
    os: dict[str, OsReboot]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OsDowntimes:
    """Downtimes in seconds, by the way to reboot an OS. `source` describes their origin."""

    seconds: dict[str, float]
    source: str


def read_measured(table: dict[str, Any], folder: Path) -> MeasuredWays:
    """Reads the files that `table` names, with paths relative to `folder`."""
    known(table, KEYS, "measured")
    vmm: dict[str, Technique] = {}
    os: dict[str, OsReboot] = {}
    notes = []
    if "vmm" in table:
        path, guests = folder / text(table, "vmm"), text(table, "vmm_guests")
        # The file has no OS reboots. A cold renewal of the VMM boots the guest, too, so its gap may serve as one.
        guests_of_os = text(table, "os_guests") if "os" not in table and "os_guests" in table else None
        parameters = measured(path, guests, guests_of_os, None if guests_of_os else 0.0)
        # The peers in the measurement are not part of a plan.
        vmm = {way: technique for way, technique in parameters.techniques.items() if way in VMM_WAYS}
        if guests_of_os:
            os = {"cold": parameters.os}
            notes.append(_note("OS", f"the cold service gap of {guests_of_os}", path))
        notes.append(_note("VMM", f"median service gaps of {guests}", path))
    if "os" in table:
        path = folder / text(table, "os")
        is_benchmark = path.suffix == ".json"
        downtimes = _of_benchmark(path, text(table, "os_guests")) if is_benchmark else _of_experiment(path)
        os = {way: OsReboot(seconds) for way, seconds in downtimes.seconds.items()}
        notes.append(_note("OS", downtimes.source, path))
    return MeasuredWays(vmm, os, tuple(notes))


def _note(what: str, source: str, path: Path) -> str:
    return f"{what}: {source} ({path.name}); degradation is taken as 0"


def _of_experiment(path: Path) -> OsDowntimes:
    """Returns the mean downtime of each level of an experiment."""
    try:
        runs = load(path, None, allow_missing=False, allow_versions=False)
    except ValueError as error:
        raise DefinitionError(f"measured.os: {error}") from error
    if "downtime_s" not in runs.responses:
        raise DefinitionError(f"measured.os: {path} has no response downtime_s; it has: {', '.join(runs.responses)}")
    for level in runs.levels:
        if level not in OS_WAYS:
            ways = ", ".join(OS_WAYS)
            raise DefinitionError(f"measured.os: {path}: level '{level}' is no way to reboot an OS; there are: {ways}")
    by_level: dict[str, list[float]] = {level: [] for level in runs.levels}
    for run in runs.done:
        by_level[run.level].append(run.responses["downtime_s"])
    fewest_runs = min(len(downtimes_s) for downtimes_s in by_level.values())
    means_s = {level: fmean(downtimes_s) for level, downtimes_s in by_level.items()}
    return OsDowntimes(means_s, f"mean downtimes of {fewest_runs} or more runs per level")


def _of_benchmark(path: Path, guest: str) -> OsDowntimes:
    """Returns the median downtimes of one guest. Of several phases the latest one counts, which is listed last."""
    downtimes_s: dict[str, float] = {}
    guests: list[str] = []
    try:
        for row in json.loads(path.read_text())["tables"][OS_TABLE]:
            guests.append(row["guest"])
            way = _way(row["reboot"])
            if row["guest"] == guest and way in OS_WAYS:
                downtimes_s[way] = row["downtime"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DefinitionError(f"measured.os: {path}: not the JSON of `make bench TOPIC=os`: {error!r}") from error
    if not downtimes_s:
        names = ", ".join(dict.fromkeys(guests))
        raise DefinitionError(f"measured.os_guests: no '{guest}' in {path}; there are: {names}")
    return OsDowntimes(downtimes_s, f"median downtimes of {guest}")


def _way(reboot: str) -> str:
    """Returns the way of `rekindle reboot`: `phase` for `phase-kernel` and `phase-services`, frozen or not."""
    return "phase" if reboot.startswith(("phase-kernel", "phase-services")) else reboot
