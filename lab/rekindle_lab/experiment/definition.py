"""Reads the definition of an experiment: factors, levels, responses, repetitions, and the runner.

`Experiment` is a complete definition; `load` reads one from a TOML file (docs/experiment-format.md; lab/README.md has
an example). A factor is what is varied, such as the technique; its levels are the compared ones, each with settings for
the runner. A response is a number that each run measures, a treatment one level of each factor. Each treatment has
`replications` runs, spread evenly over `blocks`, which are parts of the experiment that follow each other.
"""

import json
import math
import re
import tomllib
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from rekindle_lab.analysis import power
from rekindle_lab.numbers import is_finite_number
from rekindle_lab.toml import DefinitionError, known, tables, text, whole

EXPERIMENT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
RESPONSE_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Factor:
    """A factor that is varied. Each level has settings for the runner."""

    name: str
    levels: dict[str, dict[str, Any]]
    """The settings of each level, by its name."""


@dataclass(frozen=True)
class Guest:
    """The guest of `runner = "guest"`, and its client."""

    image: str = "micro"
    memory_mib: int = 128
    definition: str = ""
    """Lines in TOML that are added to the VM's definition, for all levels."""
    disk_server: bool = True
    """Whether Rekindle's disk servers have the guest's disks; otherwise QEMU has them. A level may override this."""
    disk_cache: str = ""
    """Cache mode of the guest's disks on the host; empty: the default of `rekindle`."""
    load: str = "probe"
    """The load on the guest: `probe` sends requests at a rate, `wrk` as fast as they are answered."""
    every: str = "10ms"
    """Interval between the requests of `probe` on each connection."""
    connections: int = 1
    files: int = 1
    """Number of files of the guest's web server that `wrk` requests in turn."""
    drop_caches_every_s: float = 0.0
    """Interval in seconds at which the guest drops its page cache under load; 0: never."""
    warm_up_s: float = 5.0
    measure_s: float = 15.0
    """Seconds of the window before the level's action, for throughput and response time."""
    settle_s: float = 2.0
    """Seconds for which the client continues after the action."""
    after_s: float = 10.0
    """Seconds of the window after the action, if one of that window's responses is measured."""
    sample_every_s: float = 15.0
    leak_mib: int = 0
    """Kernel memory in MiB that is leaked before the action; 0: no leak."""


@dataclass(frozen=True)
class Command:
    """The program of `runner = "command"`."""

    argv: tuple[str, ...] = ()
    deadline_s: float = 3600.0
    """Seconds after which a run has failed."""


@dataclass(frozen=True)
class Experiment:
    """A complete definition. The digest of the order includes `document`, so that a change is detected."""

    name: str
    question: str
    seed: int
    replications: int
    blocks: int
    runner: str
    """What executes a run: `guest` or `command`."""
    factors: tuple[Factor, ...]
    responses: tuple[str, ...]
    guest: Guest = field(default_factory=Guest)
    command: Command = field(default_factory=Command)
    run_s: float | None = None
    """Approximate duration of a run in seconds, for the estimate before the first run has finished."""
    document: dict[str, Any] = field(default_factory=dict)
    """The content of the file."""

    def treatments(self) -> list[dict[str, str]]:
        """Returns all combinations of levels, in the order of the file."""
        names = [factor.name for factor in self.factors]
        combinations = product(*(factor.levels for factor in self.factors))
        return [dict(zip(names, levels, strict=True)) for levels in combinations]

    def settings(self, treatment: dict[str, str]) -> dict[str, Any]:
        """Returns the settings of a treatment, of all factors together."""
        merged: dict[str, Any] = {}
        for factor in self.factors:
            merged |= factor.levels[treatment[factor.name]]
        return merged


TOP_LEVEL_KEYS = ("name", "question", "seed", "replications", "blocks", "run_s", "runner")
TOP_LEVEL_KEYS += ("factor", "response", "guest", "command")
REPLICATIONS_KEYS = ("sd_increase", "alpha", "power")
RUNNERS = ("guest", "command")


def load(path: Path, trial: int | None = None) -> Experiment:
    """Reads and checks a definition. `trial`: number of replications, in one block, instead of the definition's."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DefinitionError(f"{path}: {error}") from error
    try:
        if trial is not None:
            document |= {"replications": trial, "blocks": 1}
        return parse(document, min_replications=1 if trial else 2)
    except (DefinitionError, ValueError, TypeError) as error:
        raise DefinitionError(f"{path}: {error}") from error


def parse(document: dict[str, Any], min_replications: int = 2) -> Experiment:
    """Parses the content of the TOML file. A single replication cannot be analysed, and is for trials only."""
    known(document, TOP_LEVEL_KEYS, "the file")
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DefinitionError(f"dates, NaN and infinity have no meaning here ({error})") from error
    name = text(document, "name")
    if not EXPERIMENT_NAME.fullmatch(name):
        raise DefinitionError(f"name: '{name}'; it must be of a-z, 0-9, _ and -")
    factors = tuple(_factor(table) for table in tables(document, "factor"))
    responses = tuple(_response(table) for table in tables(document, "response"))
    _check_unique("factor", [factor.name for factor in factors])
    _check_unique("response", list(responses))
    _check_settings_of_one_factor(factors)
    runner = document.get("runner", "guest")
    if runner not in RUNNERS:
        raise DefinitionError(f"runner: '{runner}'; there are: {', '.join(RUNNERS)}")
    experiment = Experiment(
        name=name,
        question=text(document, "question", ""),
        seed=whole(document, "seed", low=0),
        replications=1,
        blocks=whole(document, "blocks", 1, low=1),
        runner=runner,
        factors=factors,
        responses=responses,
        run_s=_run_s(document),
        guest=_filled(Guest, document.get("guest", {}), "guest"),
        command=_filled(Command, document.get("command", {}), "command"),
        document=document,
    )
    if runner == "command" and not experiment.command.argv:
        raise DefinitionError("command.argv: is missing; it names the program of a run")
    replications, blocks = _replications(document, len(experiment.treatments()), min_replications), experiment.blocks
    if replications % blocks:
        raise DefinitionError(f"blocks: {blocks}; {replications} replications cannot be split evenly into them")
    return replace(experiment, replications=replications)


def _check_unique(key: str, names: list[str]) -> None:
    if not names:
        raise DefinitionError(f"no [[{key}]]; at least one is needed")
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise DefinitionError(f"{key}: '{duplicate}' is defined twice")


def _run_s(document: dict[str, Any]) -> float | None:
    value = document.get("run_s")
    if value is None:
        return None
    if not is_finite_number(value) or value <= 0:
        raise DefinitionError(f"run_s: {value!r}; it must be seconds, more than 0")
    return float(value)


def _replications(document: dict[str, Any], treatments: int, min_replications: int) -> int:
    """Returns the number of replications in the file, or that of a power analysis rounded up to whole blocks."""
    replications = document.get("replications")
    if isinstance(replications, dict):
        known(replications, REPLICATIONS_KEYS, "replications")
        if "sd_increase" not in replications:
            raise DefinitionError("replications.sd_increase: is missing; 0.15 is the paper's")
        effect = power.effect_from_sd_increase(float(replications["sd_increase"]))
        alpha, wanted_power = float(replications.get("alpha", 0.05)), float(replications.get("power", 0.90))
        needed = power.smallest_n(treatments, effect, alpha, wanted_power)
        blocks = document.get("blocks", 1)
        return math.ceil(needed / blocks) * blocks
    return whole(document, "replications", low=min_replications)


def _factor(table: dict[str, Any]) -> Factor:
    known(table, ("name", "levels"), "factor")
    name = text(table, "name")
    levels = table.get("levels")
    if not isinstance(levels, dict) or len(levels) < 2:
        raise DefinitionError(f"factor '{name}': needs at least two [factor.levels.NAME]")
    for level, settings in levels.items():
        if not isinstance(settings, dict):
            raise DefinitionError(f"factor '{name}', level '{level}': must be a table of settings (it may be empty)")
    return Factor(name, levels)


def _check_settings_of_one_factor(factors: tuple[Factor, ...]) -> None:
    """Checks that each setting belongs to one factor: with two, the value of the first factor would never apply."""
    owner: dict[str, str] = {}
    for factor in factors:
        for key in dict.fromkeys(key for settings in factor.levels.values() for key in settings):
            if key in owner:
                raise DefinitionError(
                    f"factor '{factor.name}': '{key}' is set by factor '{owner[key]}' too; make them one factor, "
                    f"with a level for each combination"
                )
            owner[key] = factor.name


def _response(table: dict[str, Any]) -> str:
    known(table, ("name",), "response")
    name = text(table, "name")
    if not RESPONSE_NAME.fullmatch(name):
        raise DefinitionError(f"response: '{name}'; names are like downtime_s, with the unit at the end")
    return name


def _filled(kind: type, table: object, where: str) -> Any:  # noqa: ANN401
    """Builds the dataclass `kind` from a table of the file, whose keys are its fields.

    A value must be of the type of the field's default, and a number more than 0 unless it is the default.
    """
    if not isinstance(table, dict):
        raise DefinitionError(f"{where}: must be a table")
    defaults = {name: field.default for name, field in kind.__dataclass_fields__.items()}
    known(table, defaults, where)
    values = {}
    for key, value in table.items():
        default = defaults[key]
        if isinstance(default, tuple):
            fits = isinstance(value, list) and all(isinstance(word, str) for word in value)
            value = tuple(value) if fits else value
        elif isinstance(default, str | bool):
            fits = isinstance(value, type(default))
        else:
            is_number = isinstance(value, int if isinstance(default, int) else int | float)
            fits = is_number and not isinstance(value, bool) and (value > 0 or value == default)
        if not fits:
            raise DefinitionError(f"{where}.{key}: {value!r}; it must be like {default!r}")
        values[key] = value
    return kind(**values)
