"""The input of RootHammer's models (`Parameters`): measured downtimes and degradations, and the two timers.

Rejuvenation restarts software on a timer, before it fails of what it has accumulated: the VMM of a host every
`Timers.vmm_interval_s`, the OS of each guest every `Timers.os_interval_s`. A technique is one way to renew the VMM.
Around a renewal the guests are down for a time and then slower (degraded). Letters such as D(n) are the paper's;
lab/README.md has the table of them. Every name ends in its unit.

Sources: `ROOTHAMMER_JBOSS` and `ROOTHAMMER_CLUSTER` (the paper's figures), `by_hand` (a TOML file), `measured` (the
JSON of `make bench TOPIC=vmm`).
"""

import json
import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from rekindle_lab.numbers import is_finite_number

DAY_S = 86_400.0


class ParameterError(ValueError):
    """A parameter is missing or impossible. The text names it."""


def _check(name: str, value: float, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raises `ParameterError` unless `value` is a number from `low` to `high`; above `low` with `open_low`."""
    if not is_finite_number(value):
        raise ParameterError(f"{name}: {value!r} is not a finite number")
    if value < low or value > high or (open_low and value == low):
        bounds = f"more than {low:g}" if open_low else f"{low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
        raise ParameterError(f"{name}: {value:g}; it must be {bounds}")


@dataclass(frozen=True)
class Timers:
    """The intervals of rejuvenation: T_vmm and T_os of the paper, with its values as defaults."""

    vmm_interval_s: float = 28 * DAY_S
    os_interval_s: float = 7 * DAY_S

    def __post_init__(self) -> None:
        _check("vmm_interval_s", self.vmm_interval_s, 0, open_low=True)
        _check("os_interval_s", self.os_interval_s, 0, open_low=True)


@dataclass(frozen=True)
class OsReboot:
    """The reboot of one guest's OS: D_os, and delta and R_os of the paper."""

    downtime_s: float
    degraded_rate: float = 0.0
    """Share of throughput lost (0 to 1) while the service is degraded around the reboot."""
    degraded_s: float = 0.0

    def __post_init__(self) -> None:
        _check("os.downtime_s", self.downtime_s, 0)
        _check("os.degraded_rate", self.degraded_rate, 0, 1)
        _check("os.degraded_s", self.degraded_s, 0)


@dataclass(frozen=True)
class Technique:
    """One way to renew the VMM under n guests.

    The paper's techniques differ in their durations and two switches: `coupled` (cold) and `spare_hosts` (migration).
    """

    name: str
    vmm_downtime_s: float
    """D(n): downtime of one VM, for one renewal of the VMM."""
    degraded_rate: float = 0.0
    """Omega, omega', gamma or gamma': share of throughput lost (0 to 1) because of the renewal, while the VM is up."""
    degraded_s: float = 0.0
    """R_vmm, R'_vmm, (n - 1) D_m or M_l: duration of that loss."""
    coupled: bool = False
    """Whether the guests are rebooted with the VMM, so that their OS timers restart."""
    spare_hosts: int = 0
    """Number of hosts that stand empty for guests to move to."""

    def __post_init__(self) -> None:
        _check(f"technique.{self.name}.vmm_downtime_s", self.vmm_downtime_s, 0)
        _check(f"technique.{self.name}.degraded_rate", self.degraded_rate, 0, 1)
        _check(f"technique.{self.name}.degraded_s", self.degraded_s, 0)
        _check(f"technique.{self.name}.spare_hosts", self.spare_hosts, 0)
        if isinstance(self.spare_hosts, float):
            raise ParameterError(f"technique.{self.name}.spare_hosts: {self.spare_hosts:g}; it must be a whole number")
        if not isinstance(self.coupled, bool):
            raise ParameterError(f"technique.{self.name}.coupled: {self.coupled!r}; it must be true or false")

    @property
    def away_s(self) -> float:
        """Seconds for which a VM is down or degraded in one renewal."""
        return self.vmm_downtime_s + self.degraded_s


@dataclass(frozen=True)
class Parameters:
    """One set of parameters, measured on one kind of host."""

    source: str
    """Source of the parameters, as text."""
    os: OsReboot
    techniques: dict[str, Technique]
    timers: Timers = field(default_factory=Timers)
    notes: tuple[str, ...] = ()
    """Assumptions behind the parameters, as text."""

    def technique(self, name: str) -> Technique:
        """Returns the technique called `name`. Raises `ParameterError` with the known names."""
        if name not in self.techniques:
            raise ParameterError(f"no technique '{name}' in {self.source}; there are: {', '.join(self.techniques)}")
        return self.techniques[name]

    def with_timers(self, timers: Timers) -> "Parameters":
        """Returns these parameters with other timers."""
        return replace(self, timers=timers)


def non_live(vm_downtime_s: float, vms: int, degraded_rate: float) -> Technique:
    """Returns non-live migration: guests move one by one, each disturbed while the other n - 1 move (section 6.2.1)."""
    others_move_s = (vms - 1) * vm_downtime_s
    return Technique("migration", vm_downtime_s, degraded_rate=degraded_rate, degraded_s=others_move_s, spare_hosts=1)


def live(migration_s: float, degraded_rate: float, name: str = "live") -> Technique:
    """Returns live migration: no downtime, but degraded for its whole duration (section 6.2.2)."""
    return Technique(name, 0.0, degraded_rate=degraded_rate, degraded_s=migration_s, spare_hosts=1)


ROOTHAMMER_JBOSS = Parameters(
    "RootHammer 5.5 (JBoss, 11 VMs)",
    OsReboot(downtime_s=34),
    {
        "warm": Technique("warm", vmm_downtime_s=43),
        "saved": Technique("saved", vmm_downtime_s=434),
        "cold": Technique("cold", vmm_downtime_s=243, coupled=True),
    },
)
"""Parameters of section 5.5, for figures 9 and 10."""

ROOTHAMMER_CLUSTER = Parameters(
    "RootHammer 6.1 and 6.2 (Apache, 11 VMs)",
    OsReboot(downtime_s=41, degraded_rate=0.35, degraded_s=410),
    {
        "warm": Technique("warm", vmm_downtime_s=59, degraded_rate=0.61, degraded_s=25),
        "cold": Technique("cold", vmm_downtime_s=219, degraded_rate=0.72, degraded_s=397, coupled=True),
        "migration": non_live(vm_downtime_s=15, vms=11, degraded_rate=0.60),
        "live": live(migration_s=181, degraded_rate=0.57),
        "live-adaptive": live(migration_s=950, degraded_rate=0.23, name="live-adaptive"),
    },
)
"""Parameters of sections 6.1.3 and 6.2.3, for figure 16."""

PAPER = {"jboss": ROOTHAMMER_JBOSS, "cluster": ROOTHAMMER_CLUSTER}


def by_hand(path: Path) -> Parameters:
    """Reads parameters from a TOML file: tables `timers`, `os` and `technique.NAME` with the fields' names as keys."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ParameterError(f"{path}: {error}") from error
    try:
        unknown = sorted(set(document) - {"timers", "os", "technique"})
        if unknown:
            raise ParameterError(f"unknown key '{unknown[0]}'; there are: timers, os, technique")
        os = _build(OsReboot, "os", document.get("os"))
        tables = document.get("technique")
        if not isinstance(tables, dict) or not tables:
            raise ParameterError("no [technique.NAME]; at least one is needed")
        techniques = {name: _build(Technique, f"technique.{name}", table, name=name) for name, table in tables.items()}
        timers = _build(Timers, "timers", document.get("timers", {}))
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from error
    return Parameters(path.name, os, techniques, timers)


def _build(kind: type, where: str, table: object, **given: str) -> Any:  # noqa: ANN401
    """Builds the dataclass `kind` from a table of the file, called `where` in errors; `given` are fields not in it."""
    if not isinstance(table, dict):
        raise ParameterError(f"no table [{where}]")
    allowed = [entry.name for entry in fields(kind) if entry.name not in given]
    unknown = sorted(set(table) - set(allowed))
    if unknown:
        raise ParameterError(f"{where}: unknown key '{unknown[0]}'; there are: {', '.join(allowed)}")
    try:
        return kind(**given, **table)
    except TypeError as error:
        raise ParameterError(f"{where}: {error}") from error


GAPS_TABLE = "Guest-stopped time and service gap"
"""Title of the table of `make bench TOPIC=vmm` with the downtimes."""
COUPLED = ("cold",)
"""The techniques of that table that reboot the guests with the VMM."""


class _GapRow(NamedTuple):
    """A row of that table: the downtime that a client of these guests saw, in ms; `None` if it was not measured."""

    guests: str
    technique: str
    gap_ms: float | None


def measured(path: Path, guests: str, os_guests: str | None = None, os_downtime_s: float | None = None) -> Parameters:
    """Reads parameters from the JSON of `make bench TOPIC=vmm`: downtimes are median service gaps seen by a client.

    `guests`: selects the rows (`"11 x micro 256M"`). The downtime of an OS reboot is `os_downtime_s`, or the cold gap
    of the rows `os_guests`. Degradation is not in these results and is taken as 0; `notes` reports that.
    """
    try:
        document = json.loads(path.read_text())
        rows = [_GapRow(row["guests"], row["how"], row["gap ms"]) for row in document["tables"][GAPS_TABLE]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path}: not the JSON of `make bench TOPIC=vmm`: {error!r}") from error

    def gaps_s(wanted: str) -> dict[str, float]:
        """Returns the service gaps of these guests, by technique."""
        of_guests = [row for row in rows if row.guests == wanted]
        by_technique = {row.technique: row.gap_ms / 1e3 for row in of_guests if row.gap_ms is not None}
        if not by_technique:
            known = ", ".join(dict.fromkeys(row.guests for row in rows))
            raise ParameterError(f"{path}: no guests '{wanted}'; there are: {known}")
        return by_technique

    notes = [
        "the VMM renewed here is a guest's QEMU process, not the host",
        "degradation around renewals is not in these results; it is taken as 0",
    ]
    if os_downtime_s is None:
        if os_guests is None:
            raise ParameterError("the downtime of an OS reboot is not known: give it, or guests for its cold gap")
        os_gaps_s = gaps_s(os_guests)
        if "cold" not in os_gaps_s:
            raise ParameterError(f"{path}: no row 'cold' for guests '{os_guests}'")
        os_downtime_s = os_gaps_s["cold"]
        notes.append(f"an OS reboot takes as long as a cold reboot of {os_guests}: {os_downtime_s:.3g} s")
    techniques = {name: Technique(name, gap_s, coupled=name in COUPLED) for name, gap_s in gaps_s(guests).items()}
    return Parameters(f"{path.name}, {guests}", OsReboot(os_downtime_s), techniques, notes=tuple(notes))
