"""The order in which hosts are renewed: evenly over the interval, with the hosts of a group far apart."""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

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


def with_vms(scope: str, away_s: float, vm_s: float, count: int) -> float:
    """Returns how long a host is unavailable or degraded, at most, with `count` more VMs of `vm_s` after `away_s`.

    A host's reboot affects all its VMs at the same time. VMMs of one host are renewed one by one, in any order.
    """
    return max(away_s, vm_s) if scope == "host" else away_s + count * vm_s


@dataclass(frozen=True)
class CapacityLimits:
    """Limits on how many of `size` hosts, renewed evenly over an interval, may be unavailable at the same time."""

    size: int
    spacing_s: float
    late_s: float
    """Longest delay of a host's timers in seconds."""
    most: int | None
    """Largest number of unavailable hosts that the capacity allows; `None`: no capacity given."""

    def concurrent(self, away_s: float) -> int:
        """Returns the largest number of hosts that are unavailable at the same time, if each takes `away_s`."""
        return min(self.size, max(1, math.ceil(self.taken_s(away_s) / self.spacing_s))) if away_s > 0 else 0

    def taken_s(self, away_s: float) -> float:
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
    most = None if fleet.capacity is None else math.floor(fleet.size * (1 - fleet.capacity) + 1e-9)
    return CapacityLimits(fleet.size, interval_s / fleet.size, late_s, most)


def roll(fleet: Fleet, interval_s: float, away_s: float, late_s: float = 0.0) -> Rolling:
    """Lays out the order for an interval, if each host takes `away_s` and its timers are at most `late_s` late."""
    limits = capacity_limits(fleet, interval_s, late_s)
    size, most = limits.size, limits.most
    taken, concurrent = limits.taken_s(away_s), limits.concurrent(away_s)
    conflicts = []
    if most is not None and not limits.keeps(away_s):
        possible = (
            f"an interval of {size * taken / most / 86400:.3g} days would do"
            if most
            else (f"with {size} hosts none may be unavailable; {math.ceil(1 / (1 - fleet.capacity))} hosts would do")
        )
        conflicts.append(
            f"capacity {fleet.capacity:g} allows {most} of {size} hosts at a time, it needs {concurrent}: {possible}"
        )
    names, groups = _interleave(fleet)
    conflicts += _overlapping_groups(groups, concurrent, taken)
    return Rolling(tuple(names), limits.spacing_s, away_s, concurrent, most, tuple(conflicts))


def _interleave(fleet: Fleet) -> tuple[list[str], list[str | None]]:
    """Orders the hosts so that those of a group are at even distances."""
    members: dict[object, list[tuple[str, str | None]]] = defaultdict(list)
    for hosts in fleet.hosts:
        key = hosts.group if hosts.group is not None else ("alone", hosts.name)
        members[key] += [(name, hosts.group) for name in hosts.names]
    placed = []
    for rank, group in enumerate(members.values()):
        shift = (rank + 0.5) / len(members)
        placed += [((index + shift) / len(group), rank, one) for index, one in enumerate(group)]
    placed.sort(key=lambda entry: entry[:2])
    return [one[0] for _, _, one in placed], [one[1] for _, _, one in placed]


def _overlapping_groups(groups: list[str | None], concurrent: int, taken: float) -> list[str]:
    """Describes the groups of which two hosts would be unavailable at the same time; the order is cyclic."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if group is not None:
            places[group].append(index)
    found = []
    for group, at in places.items():
        if len(at) < 2:
            continue
        gaps = np.diff([*at, at[0] + len(groups)])
        if gaps.min() < concurrent:
            days = len(groups) * taken / gaps.min() / 86400
            found.append(
                f"group '{group}': two of its {len(at)} hosts overlap; an interval of {days:.3g} days would do"
            )
    return found
