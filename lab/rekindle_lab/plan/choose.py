"""Chooses for each VM of a host the way to reboot its VMM and its OS, and states the limits of that choice.

- Renewal: a planned reboot of the VMM or of the OS. It clears what software accumulates while it runs (leaks,
  fragmentation: aging). A technique is one way to do it; a pair is one technique for the VMM and one for the OS.
- Coupled: a technique that reboots the guests together with the VMM, so that the OS interval starts again.
- Capacity: the share of the fleet's hosts that must be available at any time. The longer the renewal of a host takes,
  the more hosts are unavailable at the same time.

Steps: `pairs` (candidates of one kind of VM), `choose_for_host` (a pair for each kind), `describe` (with its limits).

Failures are not in the model, so a renewal has only costs. The longest intervals that aging allows are therefore the
best. Shorter intervals are possible down to the limit at which the availability misses its target.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rekindle_lab.models.availability import availability, nines
from rekindle_lab.models.crossing import crossings, os_breaks, vmm_breaks
from rekindle_lab.models.parameters import OsReboot, Technique, Timers
from rekindle_lab.models.throughput import performance

MIN_INTERVAL_PER_DOWNTIME = 20
"""Shortest interval considered, in downtimes: below it a VM would be down for more than a twentieth of the time."""
MIN_DOWNTIME_S = 1.0
"""Downtimes count as at least this long there, so that a very short downtime does not lead to intervals near 0."""


@dataclass(frozen=True)
class Choice:
    """The choice for one VM. Availability and performance are shares, from 0 to 1."""

    vmm: str
    """Name of the technique for the VMM."""
    os: str
    """Name of the technique for the OS."""
    coupled: bool
    """Whether the technique for the VMM reboots the OS, too."""
    vmm_interval_s: float
    os_interval_s: float
    availability: float
    performance: float
    meets: bool
    """Whether the availability meets the target; `True` without a target."""
    vmm_interval_min_s: float | None
    """The shortest VMM interval that meets the target, at the chosen OS interval; `None` if no target is met."""
    os_interval_min_s: float | None
    """The same for the OS interval, at the chosen VMM interval."""

    @property
    def nines(self) -> int:
        """Number of nines of the availability."""
        return nines(self.availability)


@dataclass(frozen=True)
class Pair:
    """A technique to renew a VM's VMM, with the best technique to reboot the VM's OS."""

    technique: Technique
    os: str
    """Name of the technique for the OS."""
    reboot: OsReboot
    availability: float
    """Share of time that the VM is available with this pair, at the longest intervals."""


def pairs(
    vmm: Iterable[Technique], os: Mapping[str, OsReboot], longest: Timers, target: float | None
) -> tuple[Pair, ...]:
    """Returns a pair for each technique that meets the target, or for every technique if none does; the best first.

    `vmm`: the techniques for the VMM; `os`: those for the OS, by name. `longest`: the longest intervals that aging
    allows. `target`: the least availability; `None` if the plan has none.
    """
    best_pairs = []
    for technique in vmm:
        # One OS technique per VMM technique is enough: the capacity depends on the VMM technique alone.
        candidates = [
            Pair(technique, name, reboot, availability(technique, reboot, longest)) for name, reboot in os.items()
        ]
        best_pairs.append(max(candidates, key=lambda pair: pair.availability))
    best_pairs.sort(key=lambda pair: -pair.availability)
    meeting_target = tuple(pair for pair in best_pairs if target is None or pair.availability >= target)
    return meeting_target or tuple(best_pairs)


AddVms = Callable[[float, float, int], float]
"""`add_vms(away_s, vm_away_s, count)`: how long a host is away with `count` more VMs, if it is away for `away_s`
without them, and each of them for `vm_away_s`."""
KeepsCapacity = Callable[[float], bool]
"""`keeps_capacity(away_s)`: whether the capacity is kept if each host is away for that long. If it is kept with one
time, it is kept with every shorter time."""


class VmKind(NamedTuple):
    """VMs of a host that are alike: their possible pairs, the best first, and their number."""

    pairs: Sequence[Pair]
    count: int


class HostChoice(NamedTuple):
    """A pair for each kind of a host's VMs, and the time that the host needs with them."""

    pairs: tuple[Pair, ...]
    away_s: float
    """How long a VM of the host is unavailable or degraded when the host is renewed."""


class _PartialChoice(NamedTuple):
    """Pairs for only the first kinds of a host's VMs, with the host's time and the sum over these VMs."""

    pairs: tuple[Pair, ...] = ()
    away_s: float = 0.0
    sum_of_availabilities: float = 0.0


def choose_for_host(kinds: Sequence[VmKind], add_vms: AddVms, keeps_capacity: KeepsCapacity) -> HostChoice:
    """Chooses a pair for each kind of a host's VMs.

    The result keeps the capacity, and has the largest sum of availabilities among all combinations that do. If no
    combination keeps the capacity, each kind gets its best pair.
    """
    away_s = 0.0
    for kind in kinds:
        away_s = add_vms(away_s, kind.pairs[0].technique.away_s, kind.count)
    best_of_each = HostChoice(tuple(kind.pairs[0] for kind in kinds), away_s)
    if keeps_capacity(away_s):
        return best_of_each
    return _best_within_capacity(kinds, add_vms, keeps_capacity) or best_of_each


def _best_within_capacity(kinds: Sequence[VmKind], add_vms: AddVms, keeps_capacity: KeepsCapacity) -> HostChoice | None:
    """Returns the best choice that keeps the capacity; `None` if there is none.

    Extends partial choices by one kind of VM after the other. After each kind it drops those that cannot become the
    best, so that their number stays small: all combinations would be too many.
    """
    partial_choices = [_PartialChoice()]
    for kind in kinds:
        extended = [
            _PartialChoice(
                (*partial.pairs, pair),
                add_vms(partial.away_s, pair.technique.away_s, kind.count),
                partial.sum_of_availabilities + kind.count * pair.availability,
            )
            for partial in partial_choices
            for pair in kind.pairs
        ]
        partial_choices = _drop_dominated([partial for partial in extended if keeps_capacity(partial.away_s)])
    if not partial_choices:
        return None
    largest_sum = partial_choices[-1]  # they are sorted by their sums
    return HostChoice(largest_sum.pairs, largest_sum.away_s)


def _drop_dominated(partial_choices: list[_PartialChoice]) -> list[_PartialChoice]:
    """Drops each partial choice if another takes no longer and has no smaller sum; sorts the rest by time and sum."""
    kept: list[_PartialChoice] = []
    # In ascending order of time, a choice is worth its longer time only if its sum is above all sums before.
    for partial in sorted(partial_choices, key=lambda partial: (partial.away_s, -partial.sum_of_availabilities)):
        if not kept or partial.sum_of_availabilities > kept[-1].sum_of_availabilities:
            kept.append(partial)
    return kept


def describe(pair: Pair, longest: Timers, target: float | None) -> Choice:
    """Returns the choice of a pair, with the shortest intervals that still meet the target."""
    technique, reboot = pair.technique, pair.reboot
    meets_target = target is None or pair.availability >= target
    vmm_interval_min_s = os_interval_min_s = None
    if target is not None and meets_target:
        # Varies one interval at a time and keeps the other at its longest.
        vmm_interval_min_s = _shortest_interval(
            lambda vmm_s: availability(technique, reboot, Timers(vmm_s, longest.os_interval_s)) - target,
            MIN_INTERVAL_PER_DOWNTIME * max(technique.vmm_downtime_s, MIN_DOWNTIME_S),
            longest.vmm_interval_s,
            vmm_breaks(technique, longest.os_interval_s, longest.vmm_interval_s),
        )
        lowest_os_s = MIN_INTERVAL_PER_DOWNTIME * max(reboot.downtime_s, MIN_DOWNTIME_S)
        os_interval_min_s = _shortest_interval(
            lambda os_s: availability(technique, reboot, Timers(longest.vmm_interval_s, os_s)) - target,
            lowest_os_s,
            longest.os_interval_s,
            os_breaks(technique, longest.vmm_interval_s, lowest_os_s),
        )
    return Choice(
        vmm=technique.name,
        os=pair.os,
        coupled=technique.coupled,
        vmm_interval_s=longest.vmm_interval_s,
        os_interval_s=longest.os_interval_s,
        availability=pair.availability,
        performance=performance(technique, reboot, longest),
        meets=meets_target,
        vmm_interval_min_s=vmm_interval_min_s,
        os_interval_min_s=os_interval_min_s,
    )


def interval_with_one_os_reboot_less(technique: Technique, choice: Choice) -> float | None:
    """Returns for a coupled technique the longest VMM interval, in s, with one OS reboot less than chosen.

    The number of OS reboots in a VMM interval is whole. It grows by one at each of `vmm_breaks`, so the result is just
    below the last of them. `None` if there is none: then no OS reboot can be saved.
    """
    steps_s = vmm_breaks(technique, choice.os_interval_s, choice.vmm_interval_s)
    return math.nextafter(steps_s[-1], 0.0) if steps_s else None


def _shortest_interval(
    surplus: Callable[[float], float], lowest_s: float, longest_s: float, breaks: list[float]
) -> float:
    """Returns the shortest interval such that it and all longer ones up to `longest_s` meet the target.

    `surplus` is availability less target, as a function of the interval. `breaks` are the intervals at which it jumps,
    since the number of OS reboots of a coupled technique changes there. The result is the last change of its sign.
    """
    if lowest_s >= longest_s:
        return longest_s
    sign_changes = crossings(surplus, lowest_s, longest_s, breaks)
    return sign_changes[-1].at if sign_changes else lowest_s
