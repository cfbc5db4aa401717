"""Reads a plan's TOML file (`load`): hosts and their VMs, measured downtimes, the target, and the longest intervals.

    scope = "vmm"                  # what is renewed: each VM's VMM, or the "host" with all its VMs
    vmm_interval_max_d = 28        # the longest intervals that aging allows, in days
    os_interval_max_d = 7
    [target]                       # optional, as its keys
    availability = 0.9999          # of each VM, share of time
    capacity = 0.9                 # share of hosts that serve undisturbed at every moment
    [vmm.warm]                     # a technique to renew the VMM: keys are the fields of `Technique`
    vmm_downtime_s = 43
    [os.cold]                      # a technique to reboot the OS: keys are the fields of `OsReboot`
    downtime_s = 34
    [measured]                     # optional: files with measured downtimes instead (`measured`)
    [[hosts]]                      # keys are the fields of `Hosts` and `Vms`
    name = "web"
    count = 6
    group = "web"
    [[hosts.vms]]
    name = "front"

A mistake is reported with its key and a remedy; for a misspelled key, the nearest known one is named.
"""

import re
import tomllib
from collections import Counter
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.models.parameters import DAY_S, OsReboot, ParameterError, Technique
from rekindle_lab.numbers import is_finite_number
from rekindle_lab.plan.measured import read_measured
from rekindle_lab.toml import DefinitionError, known, tables, text, whole

SCOPES = ("vmm", "host")
MAX_INTERVAL_D = 36_500
"""Limit of an interval in days: a century, above which the file has a mistake."""
VM_NAME_MAX = 63
"""Largest number of characters of a VM's name, by Rekindle's own rule."""
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Allowed host names. Printable characters only, since the name is part of the units' descriptions."""
TOP_LEVEL_KEYS = ("scope", "vmm_interval_max_d", "os_interval_max_d", "target", "measured", "vmm", "os", "hosts")


@dataclass(frozen=True)
class Vms:
    """VMs of a host that are alike: `name`, or `name-1`, `name-2`, ... if there are several."""

    name: str
    count: int
    allow_vmm: tuple[str, ...]
    """Techniques that may renew the VMM under these VMs."""
    allow_os: tuple[str, ...]
    """Techniques that may reboot the OS of these VMs."""

    @property
    def names(self) -> list[str]:
        """Names of all these VMs."""
        return _numbered(self.name, self.count)


@dataclass(frozen=True)
class Hosts:
    """Hosts that are alike, named as `Vms`. Those of one `group` should not be renewed at the same time."""

    name: str
    count: int
    group: str | None
    vms: tuple[Vms, ...]

    @property
    def names(self) -> list[str]:
        """Names of all these hosts."""
        return _numbered(self.name, self.count)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]


@dataclass(frozen=True)
class Fleet:
    """The complete input of a plan. Intervals are seconds, targets shares to 1."""

    scope: str
    """What is renewed: `vmm` or `host`."""
    vmm_interval_max_s: float
    os_interval_max_s: float
    availability: float | None
    """The target of each VM; `None` if there is none."""
    capacity: float | None
    """Share of hosts that must serve undisturbed at every moment; `None` if there is no such target."""
    vmm: dict[str, Technique]
    """The techniques to renew a VMM, by name."""
    os: dict[str, OsReboot]
    """The techniques to reboot an OS, by name."""
    hosts: tuple[Hosts, ...]
    notes: tuple[str, ...] = ()
    """Sources of the downtimes, as text."""

    @property
    def size(self) -> int:
        """Number of hosts."""
        return sum(hosts.count for hosts in self.hosts)


def load(path: Path) -> Fleet:
    """Reads a plan's file. Raises `DefinitionError` that names file, place and remedy."""
    try:
        return parse(tomllib.loads(path.read_text()), path.parent)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, DefinitionError, ParameterError) as error:
        raise DefinitionError(f"{path}: {error}") from error


def parse(document: dict[str, Any], folder: Path = Path()) -> Fleet:
    """Parses the content of the TOML file. File names in it are relative to `folder`."""
    known(document, TOP_LEVEL_KEYS, "the file")
    scope = text(document, "scope", "vmm")
    if scope not in SCOPES:
        raise DefinitionError(f"scope: '{scope}'; there are: {', '.join(SCOPES)}")
    target = _table(document, "target", "availability = 0.9999")
    known(target, ("availability", "capacity"), "target")
    measured = read_measured(_table(document, "measured", 'vmm = "vmm.json"'), folder)
    vmm = measured.vmm | _by_hand(document, "vmm", Technique, named=True, needed=not measured.vmm)
    os = measured.os | _by_hand(document, "os", OsReboot, named=False, needed=not measured.os)
    hosts = tuple(_hosts(table, tuple(vmm), tuple(os)) for table in tables(document, "hosts"))
    if not hosts:
        raise DefinitionError("no [[hosts]]; at least one is needed")
    host_names = Counter(name for alike in hosts for name in alike.names)
    duplicate = next((name for name, count in host_names.items() if count > 1), None)
    if duplicate is not None:
        raise DefinitionError(f"hosts: '{duplicate}' is defined twice")
    return Fleet(
        scope=scope,
        vmm_interval_max_s=_days(document, "vmm_interval_max_d"),
        os_interval_max_s=_days(document, "os_interval_max_d"),
        availability=_share(target, "availability"),
        capacity=_share(target, "capacity"),
        vmm=vmm,
        os=os,
        hosts=hosts,
        notes=measured.notes,
    )


def _table(document: dict[str, Any], key: str, example: str) -> dict[str, Any]:
    """Returns the table `key`, empty if it is missing; an error shows the `example` of a line in it."""
    table = document.get(key, {})
    if not isinstance(table, dict):
        raise DefinitionError(f"{key}: must be a table: [{key}], and below it {example}")
    return table


def _by_hand(document: dict[str, Any], key: str, kind: type, *, named: bool, needed: bool) -> dict[str, Any]:
    """Returns the techniques of the tables `[vmm.NAME]` or `[os.NAME]`. `named`: the dataclass `kind` has a name."""
    tables_by_name = document.get(key, {})
    if not isinstance(tables_by_name, dict) or (needed and not tables_by_name):
        raise DefinitionError(f"no [{key}.NAME]; at least one technique with its downtime is needed, or measured.{key}")
    techniques = {}
    for name, table in tables_by_name.items():
        where = f"{key}.{name}"
        if not isinstance(table, dict):
            raise DefinitionError(f"{where}: must be a table")
        fields = {key: field for key, field in kind.__dataclass_fields__.items() if key != "name"}
        known(table, fields, where)
        missing = next((key for key, field in fields.items() if field.default is MISSING and key not in table), None)
        if missing is not None:
            raise DefinitionError(f"{where}.{missing}: is missing; give the measured value")
        try:
            techniques[name] = kind(name=name, **table) if named else kind(**table)
        except ParameterError as error:
            models_prefix = f"technique.{name}." if named else "os."
            raise DefinitionError(f"{where}.{str(error).removeprefix(models_prefix)}") from error
    return techniques


def _days(document: dict[str, Any], key: str) -> float:
    value = document.get(key)
    if not is_finite_number(value) or not 0 < value < MAX_INTERVAL_D:
        problem = "is missing" if value is None else f"{value!r}; it must be more than 0"
        raise DefinitionError(f"{key}: {problem} (the longest interval in days; `rekindle-lab aging` finds it)")
    return value * DAY_S


def _share(target: dict[str, Any], key: str) -> float | None:
    value = target.get(key)
    if value is not None and not (is_finite_number(value) and 0 < value < 1):
        raise DefinitionError(f"target.{key}: {value!r}; it must be between 0 and 1")
    return value


def _hosts(table: dict[str, Any], vmm: tuple[str, ...], os: tuple[str, ...]) -> Hosts:
    """Parses one `[[hosts]]`; `vmm` and `os` are the names of all techniques."""
    known(table, ("name", "count", "group", "vms"), "hosts")
    name = text(table, "name")
    if not HOST_NAME.fullmatch(name):
        raise DefinitionError(f"hosts: name: '{name}'; it must be of a-z, A-Z, 0-9, `.`, `_` and `-`")
    group = None if "group" not in table else text(table, "group")
    vms = tuple(_vms(vms_table, name, vmm, os) for vms_table in tables(table, "vms"))
    if not vms:
        raise DefinitionError(f"hosts '{name}': no [[hosts.vms]]; at least one is needed")
    names = [vm_name for alike in vms for vm_name in alike.names]
    if len(set(names)) != len(names):
        raise DefinitionError(f"hosts '{name}': two VMs have the same name")
    return Hosts(name, whole(table, "count", 1, low=1), group, vms)


def _vms(table: dict[str, Any], host: str, vmm: tuple[str, ...], os: tuple[str, ...]) -> Vms:
    """Parses one `[[hosts.vms]]` of `host`. VMs that list no techniques allow all."""
    where = f"hosts '{host}', vms"
    known(table, ("name", "count", "allow_vmm", "allow_os"), where)
    allowed = {}
    for key, known_names in (("allow_vmm", vmm), ("allow_os", os)):
        names = table.get(key, list(known_names))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DefinitionError(f'{where}: {key}: {names!r}; it must be a list of names, as ["{known_names[0]}"]')
        unknown = [name for name in names if name not in known_names]
        if unknown or not names:
            problem = f"'{unknown[0]}' was not measured" if unknown else "is empty"
            raise DefinitionError(f"{where}: {key}: {problem}; there are: {', '.join(known_names)}")
        allowed[key] = tuple(names)
    vms = Vms(text(table, "name"), whole(table, "count", 1, low=1), **allowed)
    name_problem = _name_problem(vms.name) or _name_problem(vms.names[-1])
    if name_problem is not None:
        raise DefinitionError(f"{where}: name: '{vms.name}': {name_problem}")
    return vms


def _name_problem(name: str) -> str | None:
    """Returns why `name` is not a valid name of a VM, by Rekindle's own rule (crates/vm/src/definition/names.rs)."""
    invalid_character = re.search(r"[^a-z0-9._-]", name)
    if invalid_character:
        return f"`{invalid_character[0]}` is not allowed in a name; use only a-z, 0-9, `.`, `_` and `-`"
    if not name:
        return f"empty; write 1 to {VM_NAME_MAX} characters out of a-z, 0-9, `.`, `_` and `-`"
    if name[0] in "._-":
        return f"starts with `{name[0]}`; start it with a-z or 0-9"
    if len(name) > VM_NAME_MAX:
        return f"{name} is {len(name)} characters long; shorten it to at most {VM_NAME_MAX}"
    return None
