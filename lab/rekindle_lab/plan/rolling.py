"""Lays out the order in which hosts are renewed: evenly over the interval, with the hosts of a group far apart.

- Renewal: a planned reboot of the VMM. In it, each VM of the host is unavailable and then degraded for a time; the host
  is away until all its VMs are done.
- Capacity: the share of all hosts that must be undisturbed at any time. `CapacityLimits` computes from it how many
  hosts may be away at the same time, and for how long each.
- Group: hosts with the same service, of which two must not be away at the same time.

Entry point: `roll`.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rekindle_lab.models.parameters import DAY_S
from rekindle_lab.plan.fleet import Fleet


@dataclass(frozen=True)
class Rolling:
    """The order of the hosts. Host i is renewed `i * spacing_s` seconds after the start, and then once per interval."""

    hosts: tuple[str, ...]
    spacing_s: float
    away_s: float
    """Longest time, in seconds, that a host is unavailable or degraded, for all its VMs together."""
    concurrent: int
    """Largest number of hosts that are unavailable or degraded at the same time."""
    most_concurrent: int | None
    """Largest number of such hosts that the capacity allows; `None`: no capacity given."""
    conflicts: tuple[str, ...]
    """Requirements that cannot be met, as text."""

    @property
    def capacity(self) -> float:
        """Share (to 1) of hosts that are undisturbed at every moment."""
        return 1 - self.concurrent / len(self.hosts)


def with_vms(scope: str, away_s: float, vm_away_s: float, count: int) -> float:
    """Returns how long a host is away, if it is away for `away_s` without `count` VMs that take `vm_away_s` each.

    A host's reboot affects all its VMs at the same time. VMMs of one host are renewed one by one, in any order.
    """
    return max(away_s, vm_away_s) if scope == "host" else away_s + count * vm_away_s


@dataclass(frozen=True)
class CapacityLimits:
    """Limits on how many of `size` hosts, renewed evenly over an interval, may be unavailable at the same time.

    A host is due every `spacing_s`, and is finished at most `finished_after_s` later. The hosts that are unavailable at
    the same time are therefore those that were due in the last `finished_after_s`.
    """

    size: int
    spacing_s: float
    """Time between two hosts in seconds."""
    late_s: float
    """Longest delay of a host's timers in seconds."""
    most: int | None
    """Largest number of unavailable hosts that the capacity allows; `None`: no capacity given."""

    def concurrent(self, away_s: float) -> int:
        """Returns the largest number of hosts that are unavailable at the same time, if each takes `away_s`."""
        if away_s <= 0:
            return 0
        return min(self.size, max(1, math.ceil(self.finished_after_s(away_s) / self.spacing_s)))

    def finished_after_s(self, away_s: float) -> float:
        """Returns the latest time at which a host is finished, in seconds after it was due."""
        return away_s + self.late_s if away_s > 0 else 0.0

    @property
    def most_s(self) -> float:
        """Longest time that a host may take so that the capacity is kept, in seconds."""
        return math.inf if self.most is None else max(0.0, self.most * self.spacing_s - self.late_s)

    def keeps(self, away_s: float) -> bool:
        """Returns whether the capacity is kept."""
        return self.most is None or self.concurrent(away_s) <= self.most


def capacity_limits(fleet: Fleet, interval_s: float, late_s: float = 0.0) -> CapacityLimits:
    """Returns the limits that the capacity of a fleet sets."""
    # The small term keeps 1 of 10 at a capacity of 0.9, since 10 * (1 - 0.9) is just below 1 in binary.
    most = None if fleet.capacity is None else math.floor(fleet.size * (1 - fleet.capacity) + 1e-9)
    return CapacityLimits(fleet.size, spacing_s=interval_s / fleet.size, late_s=late_s, most=most)


def roll(fleet: Fleet, interval_s: float, away_s: float, late_s: float = 0.0) -> Rolling:
    """Lays out the order for an interval, if each host takes `away_s` and its timers are at most `late_s` late."""
    limits = capacity_limits(fleet, interval_s, late_s)
    hosts = _interleave(fleet)
    conflicts = [] if limits.keeps(away_s) else [_capacity_conflict(fleet, limits, away_s)]
    conflicts += _group_conflicts(hosts, limits.concurrent(away_s), limits.finished_after_s(away_s))
    return Rolling(
        hosts=tuple(host.name for host in hosts),
        spacing_s=limits.spacing_s,
        away_s=away_s,
        concurrent=limits.concurrent(away_s),
        most_concurrent=limits.most,
        conflicts=tuple(conflicts),
    )


def _capacity_conflict(fleet: Fleet, limits: CapacityLimits, away_s: float) -> str:
    """Describes a capacity that is not kept, with an interval or a number of hosts that would keep it."""
    assert limits.most is not None and fleet.capacity is not None
    if limits.most:
        days = limits.size * limits.finished_after_s(away_s) / limits.most / DAY_S
        remedy = f"an interval of {days:.3g} days would do"
    else:
        enough_hosts = math.ceil(1 / (1 - fleet.capacity))
        remedy = f"with {limits.size} hosts none may be unavailable; {enough_hosts} hosts would do"
    return (
        f"capacity {fleet.capacity:g} allows {limits.most} of {limits.size} hosts at a time, "
        f"it needs {limits.concurrent(away_s)}: {remedy}"
    )


class _Host(NamedTuple):
    """A host, and the group whose hosts are kept apart."""

    name: str
    group: str | None


class _PlacedHost(NamedTuple):
    """A host with its place in the interval, from 0 to 1; groups with the same place are ordered by their rank."""

    share_of_interval: float
    group_rank: int
    host: _Host


def _interleave(fleet: Fleet) -> list[_Host]:
    """Orders the hosts so that those of a group are at even distances. Hosts without a group count as one by name."""
    members: dict[object, list[_Host]] = defaultdict(list)
    for hosts in fleet.hosts:
        key = hosts.group if hosts.group is not None else ("alone", hosts.name)
        members[key] += [_Host(name, hosts.group) for name in hosts.names]
    placed_hosts = []
    for rank, group in enumerate(members.values()):
        shift = (rank + 0.5) / len(members)  # differs by group, so that groups of the same size do not coincide
        for index, host in enumerate(group):
            placed_hosts.append(_PlacedHost((index + shift) / len(group), rank, host))
    placed_hosts.sort(key=lambda placed: (placed.share_of_interval, placed.group_rank))
    return [placed.host for placed in placed_hosts]


def _group_conflicts(hosts: list[_Host], concurrent: int, finished_after_s: float) -> list[str]:
    """Describes the groups of which two hosts would be unavailable at the same time; the order is cyclic.

    `concurrent`: number of hosts that follow each other in the order and are unavailable at the same time.
    """
    indexes_of_group: dict[str, list[int]] = defaultdict(list)
    for index_in_order, host in enumerate(hosts):
        if host.group is not None:
            indexes_of_group[host.group].append(index_in_order)
    conflicts = []
    for group, indexes in indexes_of_group.items():
        if len(indexes) < 2:
            continue
        smallest_distance = np.diff([*indexes, indexes[0] + len(hosts)]).min()
        if smallest_distance < concurrent:
            days = len(hosts) * finished_after_s / smallest_distance / DAY_S
            conflicts.append(
                f"group '{group}': two of its {len(indexes)} hosts overlap; an interval of {days:.3g} days would do"
            )
    return conflicts
