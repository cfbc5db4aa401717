"""Throughput of a cluster by RootHammer's equations 3 to 6.

A host that serves has, on average, the share A (availability) of its throughput, less what is lost while its VMs are up
but degraded around renewals. Of m hosts, all serve, or m - 1 if one stands empty for guests to move to:

    P = (A - (rate R + N rate_os R_os) / T_vmm) (m - spare hosts) p,   p: throughput of one host without renewals
"""

import math
from collections.abc import Iterable

from rekindle_lab.models.availability import availability, os_reboots
from rekindle_lab.models.parameters import OsReboot, ParameterError, Technique, Timers


def degraded_share(technique: Technique, os: OsReboot, timers: Timers) -> float:
    """Returns the average share of throughput (to 1) that is lost while VMs are up, around renewals."""
    around_vmm_s = technique.degraded_rate * technique.degraded_s
    around_os_s = os_reboots(technique, timers) * os.degraded_rate * os.degraded_s
    return (around_vmm_s + around_os_s) / timers.vmm_interval_s


def performance(technique: Technique, os: OsReboot, timers: Timers) -> float:
    """Returns the average throughput of a host that serves, as a share (to 1) of its throughput without renewals."""
    return availability(technique, os, timers) - degraded_share(technique, os, timers)


def fewest_hosts(techniques: Iterable[Technique]) -> int:
    """Returns the size of the smallest cluster in which each technique leaves a host to serve; at least 2."""
    return max(2, *(math.floor(technique.spare_hosts) + 1 for technique in techniques))


def throughput_per_s(
    technique: Technique, os: OsReboot, timers: Timers, hosts: float, per_host_per_s: float = 1.0
) -> float:
    """Returns total throughput of `hosts` hosts: P_w (3), P_c (4), P_m (5), P_l (6), in requests per second."""
    if hosts <= technique.spare_hosts:
        raise ParameterError(
            f"hosts: {hosts:g}; {technique.name} keeps {technique.spare_hosts} empty, so it must be more"
        )
    return performance(technique, os, timers) * (hosts - technique.spare_hosts) * per_host_per_s


def index(technique: Technique, os: OsReboot, timers: Timers, hosts: float) -> float:
    """Returns section 6.3's performance index: throughput as a share (to 1) of that of all hosts without renewals."""
    return throughput_per_s(technique, os, timers, hosts) / hosts
