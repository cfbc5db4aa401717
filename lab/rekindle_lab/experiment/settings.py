"""Checks the settings and responses of a run with a guest, and which of them can be combined (`check`).

Settings are what the level of a factor sets for its runs; responses are the numbers that a run measures. The settings:
`reboot` (`os` or `vmm`; without it nothing is rebooted), `how` (of that reboot), `options` (more arguments of the
reboot), `protect_every` (interval of the checkpoints of a protector, such as `"2s"`), `disk_server` (overrides the
guest's), `touch` (memory that the guest fills), `definition` (lines of TOML that are added to the VM's definition).

Phases are points of its boot at which a guest saves a snapshot, to resume from it later. With `how = "phase"` and no
reboot, the guest only saves them, to measure what that costs.
"""

import shutil
from typing import Any

from rekindle_lab.experiment.definition import Experiment
from rekindle_lab.rekindle import OS_WAYS, VMM_WAYS
from rekindle_lab.toml import DefinitionError

SETTINGS = {
    "reboot": str,
    "how": str,
    "options": list,
    "protect_every": str,
    "disk_server": bool,
    "touch": str,
    "definition": str,
}
"""The settings of a level, with the types of their values."""
IMAGES = ("micro", "debian", "immutable")
LOADS = ("probe", "wrk")
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
"""Responses of the window before the action. Without any of them, a run omits that window."""
IN_GUEST = tuple(name for name in IN_WINDOW if name.startswith("guest_"))
"""Responses that are measured inside the guest, over ssh."""
RECOVERED = ("recovered_memory_pct", "recovered_available_pct")
"""Responses of a leak: how much of it the action recovers."""
OF_ACTION = ("downtime_s", *RECOVERED)
"""Responses of the action."""
AFTER = ("throughput_after_per_s", "response_time_after_ms")
"""Responses of the window after the action."""
RESPONSES = (*IN_WINDOW, *OF_ACTION, *AFTER)
WAYS = {"os": OS_WAYS, "vmm": VMM_WAYS}
"""Values of the setting `how`, by the value of `reboot`."""
WAYS_WITH_DISK_SERVERS = ("warm-cache", "phase")
"""Ways to reboot an OS that need disks with servers of Rekindle."""
WAYS_WITH_AGENT = ("kexec",)
"""Ways to reboot an OS that need an agent in the guest."""


def check(experiment: Experiment) -> None:
    """Raises `DefinitionError` for settings that a run with a guest does not support. Called before the first run."""
    guest = experiment.guest
    _check_one_of("guest.image", guest.image, IMAGES)
    _check_one_of("guest.load", guest.load, LOADS)
    if guest.load == "wrk" and shutil.which("wrk") is None:
        raise DefinitionError("guest.load: no wrk in PATH; run: scripts/setup")
    if guest.files > FILES[guest.image]:
        raise DefinitionError(f"guest.files: {guest.files}; {guest.image} has {FILES[guest.image]}")
    if guest.files > 1 and guest.load != "wrk":
        raise DefinitionError(f'guest.files: {guest.files}; only wrk requests several (load = "wrk")')
    for factor in experiment.factors:
        for level, settings in factor.levels.items():
            _check_level(f"factor '{factor.name}', level '{level}'", settings)
    for name in experiment.responses:
        if name not in RESPONSES:
            raise DefinitionError(f"response: unknown '{name}'; a guest has: {', '.join(RESPONSES)}")
        if name in IN_GUEST and guest.image == "micro":
            raise DefinitionError(f"response: '{name}' needs a debian image; micro does not report it")
        if name in RECOVERED and not guest.leak_mib:
            raise DefinitionError(f"response: '{name}', but nothing is leaked; set guest.leak_mib")
    for treatment in experiment.treatments():
        _check_treatment(experiment, treatment)


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
    """Checks the settings of all factors in a treatment together."""
    settings = experiment.settings(treatment)
    reboot, how = settings.get("reboot"), settings.get("how")
    if reboot is None:
        if how not in (None, "phase"):  # the guest then keeps phases of its boot, whose cost is measured
            raise DefinitionError(f"treatment {treatment}: how: '{how}' without a reboot; set reboot, or leave how out")
        if "options" in settings:
            raise DefinitionError(f"treatment {treatment}: options without a reboot; set reboot, or leave options out")
        of_reboot = next((name for name in experiment.responses if name in (*OF_ACTION, *AFTER)), None)
        if of_reboot is not None:
            raise DefinitionError(f"response: '{of_reboot}', but treatment {treatment} reboots nothing")
    else:
        _check_one_of(f"treatment {treatment}: reboot", reboot, tuple(WAYS))
        if how is not None:
            _check_one_of(f"treatment {treatment}: how of the reboot of {reboot}", how, WAYS[reboot])
    if how in WAYS_WITH_DISK_SERVERS and not settings.get("disk_server", experiment.guest.disk_server):
        raise DefinitionError(f"treatment {treatment}: {how} needs disks with servers; set disk_server = true")
    if how in WAYS_WITH_AGENT and experiment.guest.image == "micro":
        raise DefinitionError(f"treatment {treatment}: {how} needs an agent in the guest, which micro does not have")
