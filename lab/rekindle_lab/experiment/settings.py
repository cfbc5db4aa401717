"""Checks the settings and responses of a run with a guest, and which of them can be combined (`check`).

Words of an experiment:

- A *factor* has levels, and each level has *settings* for its runs. A *treatment* is one level of each factor.
- The *action* of a run reboots the guest's OS or its VMM (QEMU). With a *leak*, the guest's kernel loses
  `guest.leak_mib` of memory before the action, which may recover it.
- A run measures load in two *windows*, one before and one after the action. *Responses* are the measured numbers.
- *Phases* are points of its boot at which a guest saves a snapshot, to resume from it later.
"""

import shutil
from typing import Any

from rekindle_lab.experiment.definition import Experiment
from rekindle_lab.experiment.definition import Guest as GuestSpec
from rekindle_lab.rekindle import OS_WAYS, VMM_WAYS
from rekindle_lab.toml import DefinitionError

SETTINGS = {
    "reboot": str,  # what the action reboots, `os` or `vmm`; without it there is no action
    "how": str,  # way to reboot; `phase` without `reboot`: the guest only saves its phases, to measure what that costs
    "options": list,  # more arguments of the reboot
    "protect_every": str,  # interval of the checkpoints of a protector, such as "2s"; without it there is none
    "disk_server": bool,  # whether a disk server of Rekindle serves the guest's disks; overrides `guest.disk_server`
    "touch": str,  # memory that the guest fills, such as "64M"
    "definition": str,  # lines of TOML that are added to the VM's definition
}
"""The settings of a level, with the types of their values."""
WAYS = {"os": OS_WAYS, "vmm": VMM_WAYS}
"""Values of the setting `how`, by the value of `reboot`."""
WAYS_WITH_DISK_SERVERS = ("warm-cache", "phase")
"""Ways to reboot an OS that need disks with servers of Rekindle."""
WAYS_WITH_AGENT = ("kexec",)
"""Ways to reboot an OS that need an agent in the guest."""

IMAGES = ("micro", "debian", "immutable")
"""Images of guests. micro has one program and no agent; the others are a whole Debian with ssh and an agent."""
LOADS = ("probe", "wrk")
"""Clients that put load on the guest's web server: `rekindle probe`, or wrk."""
FILES = {"micro": 1, "debian": 200, "immutable": 200}
"""Number of files of each guest's web server."""

IN_WINDOW = (
    "throughput_per_s",
    "response_time_ms",
    "failed_requests",
    "host_cpu_pct",
    "host_resident_kib",
    "host_read_bytes",
    "host_written_bytes",
    "guest_cpu_pct",
    "guest_load",
    "guest_free_kib",
    "guest_io_blocks",
)
"""Responses of the window before the action."""
IN_GUEST = tuple(name for name in IN_WINDOW if name.startswith("guest_"))
"""Responses that are measured inside the guest, over ssh."""
RECOVERED = ("recovered_memory_pct", "recovered_available_pct")
"""Responses of a leak: how much of it the action recovers."""
OF_ACTION = ("downtime_s", *RECOVERED)
AFTER = ("throughput_after_per_s", "response_time_after_ms")
"""Responses of the window after the action."""
RESPONSES = (*IN_WINDOW, *OF_ACTION, *AFTER)


def check(experiment: Experiment) -> None:
    """Raises `DefinitionError` for settings that a run with a guest does not support. Called before the first run."""
    _check_guest(experiment.guest)
    for factor in experiment.factors:
        for level, settings in factor.levels.items():
            _check_level(f"factor '{factor.name}', level '{level}'", settings)
    for name in experiment.responses:
        _check_response(name, experiment.guest)
    for treatment in experiment.treatments():
        _check_treatment(experiment, treatment)


def _check_guest(guest: GuestSpec) -> None:
    _check_one_of("guest.image", guest.image, IMAGES)
    _check_one_of("guest.load", guest.load, LOADS)
    if guest.load == "wrk" and shutil.which("wrk") is None:
        raise DefinitionError("guest.load: no wrk in PATH; run: scripts/setup")
    if guest.files > FILES[guest.image]:
        raise DefinitionError(f"guest.files: {guest.files}; {guest.image} has {FILES[guest.image]}")
    if guest.files > 1 and guest.load != "wrk":
        raise DefinitionError(f'guest.files: {guest.files}; only wrk requests several (load = "wrk")')


def _check_response(name: str, guest: GuestSpec) -> None:
    if name not in RESPONSES:
        raise DefinitionError(f"response: unknown '{name}'; a guest has: {', '.join(RESPONSES)}")
    if name in IN_GUEST and guest.image == "micro":
        raise DefinitionError(f"response: '{name}' needs a debian image; micro does not report it")
    if name in RECOVERED and not guest.leak_mib:
        raise DefinitionError(f"response: '{name}', but nothing is leaked; set guest.leak_mib")


def _check_one_of(where: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise DefinitionError(f"{where}: '{value}'; there are: {', '.join(known)}")


def _check_level(where: str, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if key not in SETTINGS:
            raise DefinitionError(f"{where}: unknown setting '{key}'; there are: {', '.join(SETTINGS)}")
        if not isinstance(value, SETTINGS[key]):
            raise DefinitionError(f"{where}: {key}: {value!r} is not of the kind {SETTINGS[key].__name__}")


def _check_treatment(experiment: Experiment, treatment: dict[str, str]) -> None:
    """Checks the settings of a treatment's levels together. `treatment`: level by factor."""
    where = f"treatment {treatment}"
    settings = experiment.settings(treatment)
    how = settings.get("how")
    if "reboot" in settings:
        _check_reboot(where, settings["reboot"], how)
    else:
        _check_no_reboot(where, settings, experiment.responses)
    if how in WAYS_WITH_DISK_SERVERS and not settings.get("disk_server", experiment.guest.disk_server):
        raise DefinitionError(f"{where}: {how} needs disks with servers; set disk_server = true")
    if how in WAYS_WITH_AGENT and experiment.guest.image == "micro":
        raise DefinitionError(f"{where}: {how} needs an agent in the guest, which micro does not have")


def _check_reboot(where: str, reboot: str, how: str | None) -> None:
    _check_one_of(f"{where}: reboot", reboot, tuple(WAYS))
    if how is not None:
        _check_one_of(f"{where}: how of the reboot of {reboot}", how, WAYS[reboot])


def _check_no_reboot(where: str, settings: dict[str, Any], responses: tuple[str, ...]) -> None:
    how = settings.get("how")
    if how not in (None, "phase"):
        raise DefinitionError(f"{where}: how: '{how}' without a reboot; set reboot, or leave how out")
    if "options" in settings:
        raise DefinitionError(f"{where}: options without a reboot; set reboot, or leave options out")
    for name in responses:
        if name in (*OF_ACTION, *AFTER):
            raise DefinitionError(f"response: '{name}', but {where} reboots nothing")
