"""Availability by RootHammer's equations 1 and 2, and by those for saved, migrated and live-migrated VMs (5.5, 6.2).

All of them are one formula. In one interval of the VMM (T_vmm), a VM is down for D(n), the renewal of the VMM, and for
D_os in each of N reboots of its OS:

    A = 1 - (D(n) + N D_os) / T_vmm,   N = (T_vmm - D(n)) / T_os, rounded down for a coupled technique
"""

import math

from rekindle_lab.models.parameters import OsReboot, ParameterError, Technique, Timers


def os_reboots(technique: Technique, timers: Timers) -> float:
    """Returns the average number of OS reboots in one interval of the VMM (N_w, N_s, N_m, N_l; the floor of N_c).

    The OS's timer stands still while the VMM is renewed. A coupled technique restarts the timer, so that only whole
    intervals count. The OS reboot that goes with the VMM is part of `vmm_downtime_s` and not counted.
    """
    if technique.vmm_downtime_s >= timers.vmm_interval_s:
        raise ParameterError(
            f"technique.{technique.name}.vmm_downtime_s: {technique.vmm_downtime_s:g}; it must be less than "
            f"vmm_interval_s ({timers.vmm_interval_s:g})"
        )
    reboots = (timers.vmm_interval_s - technique.vmm_downtime_s) / timers.os_interval_s
    return float(math.floor(reboots)) if technique.coupled else reboots


def downtime_s(technique: Technique, os: OsReboot, timers: Timers) -> float:
    """Returns the planned downtime of one VM in one interval of the VMM, in seconds."""
    return technique.vmm_downtime_s + os_reboots(technique, timers) * os.downtime_s


def availability(technique: Technique, os: OsReboot, timers: Timers) -> float:
    """Returns the share of time (to 1) in which a VM's service is up: A_w (1), A_c (2), A_s, A_m, A_l.

    Failures are left out, as in the paper. The result is below 0 if the timers are shorter than the downtimes allow.
    """
    return 1.0 - downtime_s(technique, os, timers) / timers.vmm_interval_s


def nines(value: float) -> int:
    """Returns the number of nines of an availability: 0.99993 has 4; 1 has infinitely many, returned as 99."""
    if value >= 1.0:
        return 99
    if value <= 0.0:
        return 0
    # The small term keeps 0.999 at 3 nines, whose binary fraction is just below 0.999.
    return max(0, math.floor(-math.log10(1.0 - value) + 1e-9))
