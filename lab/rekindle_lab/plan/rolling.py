"""The order in which hosts are renewed: evenly over the interval, those of one group far from each other."""

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from rekindle_lab.plan.fleet import Fleet


@dataclass(frozen=True)
class Rolling:
    """The order. Host i is renewed `i * spacing_s` seconds after the start, and so every interval."""

    hosts: tuple[str, ...]
    spacing_s: float
    away_s: float
    """How long a host is away or degraded, at most, all its VMs together."""
    at_once: int
    """So many are at the same time, at most."""
    most_at_once: int | None
    """So many the capacity allows."""
    conflicts: tuple[str, ...]
    """In words: what cannot be kept."""

    @property
    def capacity(self) -> float:
        """Share (to 1) of hosts that are undisturbed at every moment."""
        return 1 - self.at_once / len(self.hosts)


def with_vms(scope: str, away_s: float, vm_s: float, count: int) -> float:
    """How long a host is away or degraded at most that was so for `away_s`, with `count` VMs more of `vm_s` each.

    A host's reboot takes all its VMs at the same time. VMMs of one host are renewed one after the other, in any order.
    """
    return max(away_s, vm_s) if scope == "host" else away_s + count * vm_s


@dataclass(frozen=True)
class Room:
    """How many hosts may be away at once, and how many are, with `size` hosts evenly over an interval."""

    size: int
    spacing_s: float
    late_s: float
    """So long a host waits at most for its timers."""
    most: int | None
    """So many the capacity allows; `None`: it is not given."""

    def at_once(self, away_s: float) -> int:
        """So many are away at the same time, at most, if each takes `away_s`."""
        return min(self.size, max(1, math.ceil(self.taken_s(away_s) / self.spacing_s))) if away_s > 0 else 0

    def taken_s(self, away_s: float) -> float:
        """How long after its time a host has done, at most."""
        return away_s + self.late_s if away_s > 0 else 0.0

    @property
    def most_s(self) -> float:
        """How long a host may be away at most, so that the capacity is kept."""
        return math.inf if self.most is None else max(0.0, self.most * self.spacing_s - self.late_s)

    def keeps(self, away_s: float) -> bool:
        """Whether the capacity is kept so."""
        return self.most is None or self.at_once(away_s) <= self.most


def room(fleet: Fleet, interval_s: float, late_s: float = 0.0) -> Room:
    """What a fleet's capacity leaves."""
    most = None if fleet.capacity is None else math.floor(fleet.size * (1 - fleet.capacity) + 1e-9)
    return Room(fleet.size, interval_s / fleet.size, late_s, most)


def roll(fleet: Fleet, interval_s: float, away_s: float, late_s: float = 0.0) -> Rolling:
    """Lay out the order for an interval, if each host takes `away_s` and waits `late_s` at most for its timers."""
    there = room(fleet, interval_s, late_s)
    size, most = there.size, there.most
    taken, at_once = there.taken_s(away_s), there.at_once(away_s)
    conflicts = []
    if most is not None and not there.keeps(away_s):
        possible = (
            f"an interval of {size * taken / most / 86400:.3g} days would do"
            if most
            else (f"with {size} hosts none may be away; {math.ceil(1 / (1 - fleet.capacity))} hosts would do")
        )
        conflicts.append(
            f"capacity {fleet.capacity:g} allows {most} of {size} hosts at once, it needs {at_once}: {possible}"
        )
    names, groups = _interleave(fleet)
    conflicts += _too_near(groups, at_once, taken)
    return Rolling(tuple(names), there.spacing_s, away_s, at_once, most, tuple(conflicts))


def _interleave(fleet: Fleet) -> tuple[list[str], list[str | None]]:
    """Hosts so that those of a group are evenly far from each other."""
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


def _too_near(groups: list[str | None], at_once: int, taken: float) -> list[str]:
    """Groups of which two would be away at the same time; the order goes round."""
    places: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        if group is not None:
            places[group].append(index)
    found = []
    for group, at in places.items():
        if len(at) < 2:
            continue
        gaps = np.diff([*at, at[0] + len(groups)])
        if gaps.min() < at_once:
            days = len(groups) * taken / gaps.min() / 86400
            found.append(
                f"group '{group}': two of its {len(at)} hosts are away at once; an interval of {days:.3g} days would do"
            )
    return found
