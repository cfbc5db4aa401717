"""systemd units that carry a host's part of a plan out.

A timer fires often; `rekindle-due` decides by stamps of the last renewals, so that intervals of any length outlast a
reboot of the host, and lateness does not add up. The warm technique's timers are independent (the paper's figure 2): a
VMM's renewal leaves the OS's stamps alone. The cold one's are coupled (figure 3): it sets them anew. A lock keeps a
renewal of the VMM from beginning during one of an OS.
"""

from collections import defaultdict
from dataclasses import dataclass

FOLDER = "/etc/rekindle/plan"
STAMPS = "/var/lib/rekindle/renewed"
LOCK = "/run/rekindle-renewal.lock"
TICK = "*:0/5"
"""Timers look every 5 minutes."""

DUE = f"""#!/bin/sh
# rekindle-due NAME INTERVAL_S PHASE_S: exit status 0 if the renewal NAME is due, 1 if not.
#
# PHASE_S (seconds since 1970): it is due once in each interval that begins there: lateness does not add up.
# PHASE_S of -: it is due INTERVAL_S seconds after its stamp, which a coupled renewal sets anew.
# A renewal without a stamp is taken to have been done now.
set -eu
stamp=${{REKINDLE_STAMPS:-{STAMPS}}}/$1
now=$(date +%s)
if [ ! -e "$stamp" ]; then
	mkdir -p "${{stamp%/*}}"
	touch -d "@$now" "$stamp"
	exit 1
fi
last=$(stat -c %Y "$stamp")
if [ "$3" = - ]; then
	[ $((now - last)) -ge "$2" ]
else
	[ "$now" -ge "$3" ] || exit 1
	[ "$last" -ge "$3" ] || exit 0
	[ $(((now - $3) / $2)) -gt $(((last - $3) / $2)) ]
fi
"""


@dataclass(frozen=True)
class Vm:
    """A VM of the host. Phases are seconds since 1970."""

    name: str
    vmm: str
    os: str
    coupled: bool
    os_interval_s: int
    os_phase_s: int


@dataclass(frozen=True)
class HostPlan:
    """A host's part of the plan."""

    name: str
    scope: str
    vmm_interval_s: int
    vmm_phase_s: int
    vms: tuple[Vm, ...]


def units(plan: HostPlan, rekindle: str) -> dict[str, str]:
    """The files of a host, by name. `rekindle`: the program's absolute path."""
    files = {"rekindle-due": DUE}
    stamps = ["vmm", *(f"os-{vm.name}" for vm in plan.vms if vm.coupled)]
    files["rekindle-plan-vmm.service"] = _service(
        f"Rekindle: renew the {'host' if plan.scope == 'host' else 'VMM'} of {plan.name}",
        f"vmm {plan.vmm_interval_s} {plan.vmm_phase_s}",
        _renewals(plan, rekindle),
        stamps,
        before=plan.scope == "host",
    )
    files["rekindle-plan-vmm.timer"] = _timer(f"Rekindle: the VMM of {plan.name}")
    for vm in plan.vms:
        files[f"rekindle-plan-os-{vm.name}.service"] = _service(
            f"Rekindle: reboot the OS of {vm.name}",
            f"os-{vm.name} {vm.os_interval_s} {'-' if vm.coupled else vm.os_phase_s}",
            [f"{rekindle} reboot os {vm.name} --how {vm.os}"],
            [f"os-{vm.name}"],
        )
        files[f"rekindle-plan-os-{vm.name}.timer"] = _timer(f"Rekindle: the OS of {vm.name}")
    return files


def _renewals(plan: HostPlan, rekindle: str) -> list[str]:
    if plan.scope == "host":
        # One reboot for all: VMs that cannot be kept are rebooted with it.
        how = "warm" if any(vm.vmm == "warm" for vm in plan.vms) else plan.vms[0].vmm
        return [f"{rekindle} reboot host --how {how}"]
    by_how: dict[str, list[str]] = defaultdict(list)
    for vm in plan.vms:
        by_how[vm.vmm].append(vm.name)
    return [f"{rekindle} reboot vmm {' '.join(names)} --how {how}" for how, names in by_how.items()]


def _service(what: str, due: str, commands: list[str], stamps: list[str], *, before: bool = False) -> str:
    touch = f"ExecStart=/usr/bin/touch {' '.join(f'{STAMPS}/{stamp}' for stamp in stamps)}"
    lines = [f"ExecStart=/usr/bin/flock {LOCK} {command}" for command in commands]
    # A host that reboots does not come back to touch its stamps: they are set before, and only then.
    lines = [touch, *lines] if before else [*lines, touch]
    body = "\n".join(lines)
    return f"[Unit]\nDescription={what}\n\n[Service]\nType=oneshot\nExecCondition={FOLDER}/rekindle-due {due}\n{body}\n"


def _timer(what: str) -> str:
    return (
        f"[Unit]\nDescription={what}\n\n[Timer]\nOnCalendar={TICK}\nAccuracySec=1s\nPersistent=true\n\n"
        f"[Install]\nWantedBy=timers.target\n"
    )
