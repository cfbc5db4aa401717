"""Makes the systemd units that execute the plan of one host (`units`), and their script (`RENEW_SCRIPT`).

A timer fires often. `rekindle-renew` decides by time stamps of the last renewals whether one is due, so that intervals
of any length survive a reboot of the host, and delays do not add up. The timers of the warm technique are independent
(the paper's figure 2): a renewal of the VMM does not change the stamps of the OS. The timers of the cold technique are
coupled (figure 3): a renewal of the VMM sets the stamps of the OS. A lock allows one renewal of a host at a time, and
each checks whether it is due once it has the lock. Each VM has separate units, so that a failing one does not block the
others.

A phase is the moment from which the intervals of a renewal are counted, in seconds since 1970.
"""

from dataclasses import dataclass

from rekindle_lab.rekindle import OS_WAYS, VMM_WAYS
from rekindle_lab.toml import DefinitionError

FOLDER = "/etc/rekindle/plan"
"""Folder of the script on the host."""
STAMPS = "/var/lib/rekindle/renewed"
"""Folder of the stamps: files whose times are those of the last renewals."""
LOCK = "/run/rekindle-renewal.lock"
TICK_S = 300
"""Seconds between two firings of a timer: a renewal may start this much later than it is due."""
RETRY_S = 3600
"""Seconds after which a renewal that failed is tried again."""

RENEW_SCRIPT = f"""#!/bin/sh
# rekindle-renew NAME INTERVAL_S PHASE_S [ALSO]... -- COMMAND...: run COMMAND if the renewal NAME is due.
#
# PHASE_S (seconds since 1970): it is due once in each interval that begins there, so delays do not add up.
# PHASE_S of -: it is due INTERVAL_S seconds after its stamp, which a coupled renewal sets, too.
# A renewal without a stamp counts as done now. One that succeeds sets the stamps of NAME and each ALSO.
# One that fails or is interrupted is tried again after {RETRY_S} s.
set -eu
stamps=${{REKINDLE_STAMPS:-{STAMPS}}}
name=$1 interval=$2 phase=$3
shift 3
also=
while [ "$1" != -- ]; do
	also="$also $1"
	shift
done
shift
# One at a time. Processes that COMMAND leaves must not keep the lock, so it is not inherited.
exec 9>"${{REKINDLE_RENEWAL_LOCK:-{LOCK}}}"
flock 9
# When the host reboots, systemd terminates this script too, perhaps before the stamps are set: it runs to its end.
# COMMAND and its processes are terminated as usual: a trap is not inherited.
trap : TERM
# A host that goes down starts no renewal.
[ "$(systemctl is-system-running 2>/dev/null)" != stopping ] || exit 0
now=$(date +%s)
stamp=$stamps/$name
if [ ! -e "$stamp" ]; then
	mkdir -p "$stamps"
	touch -d "@$now" "$stamp"
	exit 0
fi
last=$(stat -c %Y "$stamp")
if [ "$last" -gt "$now" ]; then # the clock was wrong
	touch -d "@$now" "$stamp"
	last=$now
fi
if [ "$phase" = - ]; then
	[ $((now - last)) -ge "$interval" ] || exit 0
else
	[ "$now" -ge "$phase" ] || exit 0
	[ "$last" -lt "$phase" ] || [ $(((now - phase) / interval)) -gt $(((last - phase) / interval)) ] || exit 0
fi
tried=$stamps/.$name.tried
if [ -e "$tried" ]; then
	age=$((now - $(stat -c %Y "$tried")))
	if [ "$age" -ge 0 ] && [ "$age" -lt {RETRY_S} ]; then exit 0; fi
fi
# Without a writable stamp nothing starts, since it would start again at each check.
touch -d "@$now" "$tried"
sync "$tried"
# The stamps are set after COMMAND: if interrupted in between it is repeated rather than skipped for an interval.
"$@" 9>&-
# A host that is being rebooted may end at any moment from here on: the stamps are synced before the mark is removed.
for each in "$name" $also; do
	touch "$stamps/$each"
	sync "$stamps/$each"
done
rm "$tried"
"""


@dataclass(frozen=True)
class Vm:
    """A VM of the host. Phases are seconds since 1970."""

    name: str
    vmm: str
    """Way to renew the VMM: a value of `--how` of `rekindle replace-qemu`."""
    os: str
    """Way to reboot the OS: a value of `--how` of `rekindle reboot`."""
    coupled: bool
    """Whether that way to renew the VMM reboots the OS, too."""
    os_interval_s: int
    os_phase_s: int


@dataclass(frozen=True)
class HostPlan:
    """The part of a plan for one host."""

    name: str
    scope: str
    """What is renewed: `vmm` or `host`."""
    vmm_interval_s: int
    vmm_phase_s: int
    vms: tuple[Vm, ...]


def units(plan: HostPlan, rekindle: str) -> dict[str, str]:
    """Returns the contents of the units' files for a host, by file name. `rekindle`: the program's absolute path.

    Raises `DefinitionError` if `rekindle` has no command for the plan.
    """
    _check_ways(plan)
    files = {"rekindle-renew": RENEW_SCRIPT}
    vmm_timer = f"{plan.vmm_interval_s} {plan.vmm_phase_s}"
    if plan.scope == "host":
        also = "".join(f" os-{vm.name}" for vm in plan.vms if vm.coupled)
        command = f"host {vmm_timer}{also} -- {rekindle} reboot-host {_reboot_options(plan)}"
        files |= _service_and_timer("host", f"Rekindle: renew the host {plan.name}", command)
    for vm in plan.vms:
        if plan.scope == "vmm":
            also = f" os-{vm.name}" if vm.coupled else ""
            command = f"vmm-{vm.name} {vmm_timer}{also} -- {rekindle} replace-qemu {vm.name} --how {vm.vmm}"
            files |= _service_and_timer(f"vmm-{vm.name}", f"Rekindle: renew the VMM of {vm.name}", command)
        phase = "-" if vm.coupled else vm.os_phase_s
        command = f"os-{vm.name} {vm.os_interval_s} {phase} -- {rekindle} reboot {vm.name} --how {vm.os}"
        files |= _service_and_timer(f"os-{vm.name}", f"Rekindle: reboot the OS of {vm.name}", command)
    return files


def _check_ways(plan: HostPlan) -> None:
    for vm in plan.vms:
        for kind, way, ways in (("vmm", vm.vmm, VMM_WAYS), ("os", vm.os, OS_WAYS)):
            if way not in ways:
                raise DefinitionError(f"VM '{vm.name}': {kind}.{way} cannot be done by timers; {', '.join(ways)}")


def _reboot_options(plan: HostPlan) -> str:
    """Returns the options of one reboot for all VMs: how, and what happens to VMs that cannot be kept."""
    ways = {vm.vmm for vm in plan.vms}
    if len(ways) == len(VMM_WAYS):
        raise DefinitionError(
            f"host '{plan.name}': some VMs are to be kept, some saved and some shut down; `rekindle reboot-host` does "
            "the same to all that cannot be kept: allow_vmm of one kind without the other"
        )
    first, *others = (way for way in VMM_WAYS if way in ways)
    return f"--how {first} --others {others[0]}" if others else f"--how {first}"


def _service_and_timer(name: str, description: str, command: str) -> dict[str, str]:
    """Returns a service that runs `rekindle-renew` with the arguments `command`, and its timer, by file name."""
    unit = f"[Unit]\nDescription={description}\n\n"
    return {
        f"rekindle-plan-{name}.service": f"{unit}{SERVICE_SECTION}ExecStart={FOLDER}/rekindle-renew {command}\n",
        f"rekindle-plan-{name}.timer": (
            f"{unit}[Timer]\nOnCalendar=*:0/{TICK_S // 60}\nAccuracySec=1s\nPersistent=true\n\n"
            f"[Install]\nWantedBy=timers.target\n"
        ),
    }


SERVICE_SECTION = """[Service]
Type=oneshot
# The new QEMU is in this unit's control group and must outlive the command.
KillMode=process
# A stop waits for the renewal, which continues at SIGTERM, and does not kill it if that takes long.
SendSIGKILL=no
OOMPolicy=continue
TasksMax=infinity
TimeoutStartSec=2h
"""
