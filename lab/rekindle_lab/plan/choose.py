"""Chooses techniques and intervals of a host's VMs: the pairs with the highest availability that keep the capacity.

Steps: `pairs` (of one kind of VM, the best first), `best` (a pair for each kind of a host), `choice` (with its limits).

Failures are not in the model, so a renewal has only costs. The longest intervals that aging allows are therefore the
best; shorter ones are possible until the target is missed. The result includes those limits.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rekindle_lab.models.availability import availability, nines
from rekindle_lab.models.crossing import crossings, os_breaks, vmm_breaks
from rekindle_lab.models.parameters import OsReboot, Technique, Timers
from rekindle_lab.models.throughput import performance

MIN_INTERVAL_PER_DOWNTIME = 20
"""Least ratio of an interval to its downtime."""


@dataclass(frozen=True)
class Choice:
    """The choice for one VM. Intervals are seconds, shares go to 1."""

    vmm: str
    os: str
    coupled: bool
    vmm_interval_s: float
    os_interval_s: float
    availability: float
    performance: float
    meets: bool
    vmm_interval_min_s: float | None
    """The shortest VMM interval that meets the target, at the chosen OS interval; `None` if no target is met."""
    os_interval_min_s: float | None

    @property
    def nines(self) -> int:
        """Number of nines of the availability."""
        return nines(self.availability)


@dataclass(frozen=True)
class Pair:
    """A technique to renew a VM's VMM, with the best technique to reboot the VM's OS."""

    technique: Technique
    os: str
    reboot: OsReboot
    availability: float


def pairs(
    vmm: Iterable[Technique], os: Sequence[tuple[str, OsReboot]], longest: Timers, target: float | None
) -> tuple[Pair, ...]:
    """Returns a pair for each technique that meets the target, or for every technique if none does; the best first."""
    best_pairs = []
    for technique in vmm:
        candidates = (Pair(technique, name, reboot, availability(technique, reboot, longest)) for name, reboot in os)
        best_pairs.append(max(candidates, key=lambda pair: pair.availability))
    best_pairs.sort(key=lambda pair: -pair.availability)
    meeting_target = tuple(pair for pair in best_pairs if target is None or pair.availability >= target)
    return meeting_target or tuple(best_pairs)


class VmKind(NamedTuple):
    """VMs of a host that are alike: their possible pairs, the best first, and their number."""

    pairs: Sequence[Pair]
    count: int


class HostChoice(NamedTuple):
    """A pair for each kind of a host's VMs, and how long the host is unavailable with these pairs."""

    pairs: tuple[Pair, ...]
    away_s: float


class _PartialChoice(NamedTuple):
    """Pairs for the first kinds of a host's VMs: how long the host is unavailable, and the sum of availabilities."""

    pairs: tuple[Pair, ...] = ()
    away_s: float = 0.0
    sum_of_availabilities: float = 0.0


def best(
    kinds: Sequence[VmKind],
    with_vms: Callable[[float, float, int], float],
    keeps: Callable[[float], bool],
) -> HostChoice:
    """Chooses a pair for each kind of a host's VMs.

    Takes the largest sum of availabilities among the combinations with which the host is unavailable for so short a
    time that `keeps` holds; without such a combination, the best pair of each kind. `with_vms`: how long a host is
    unavailable, from that time without these VMs, the time of each VM, and their number. `keeps`: whether the capacity
    is kept; must hold for all shorter times, too.
    """
    away_s = 0.0
    for kind in kinds:
        away_s = with_vms(away_s, kind.pairs[0].technique.away_s, kind.count)
    best_of_each = HostChoice(tuple(kind.pairs[0] for kind in kinds), away_s)
    if keeps(away_s):
        return best_of_each
    return _best_that_keeps(kinds, with_vms, keeps) or best_of_each


def _best_that_keeps(
    kinds: Sequence[VmKind],
    with_vms: Callable[[float, float, int], float],
    keeps: Callable[[float], bool],
) -> HostChoice | None:
    """Extends partial choices by one kind of VM after the other; drops those that cannot become the best."""
    partial_choices = [_PartialChoice()]
    for kind in kinds:
        extended = [
            _PartialChoice(
                (*partial.pairs, pair),
                with_vms(partial.away_s, pair.technique.away_s, kind.count),
                partial.sum_of_availabilities + kind.count * pair.availability,
            )
            for partial in partial_choices
            for pair in kind.pairs
        ]
        partial_choices = _drop_dominated([partial for partial in extended if keeps(partial.away_s)])
    return HostChoice(partial_choices[-1].pairs, partial_choices[-1].away_s) if partial_choices else None


def _drop_dominated(partial_choices: list[_PartialChoice]) -> list[_PartialChoice]:
    """Drops each partial choice for which another one has a shorter time and a higher sum; sorts by both."""
    kept: list[_PartialChoice] = []
    for partial in sorted(partial_choices, key=lambda partial: (partial.away_s, -partial.sum_of_availabilities)):
        if not kept or partial.sum_of_availabilities > kept[-1].sum_of_availabilities:
            kept.append(partial)
    return kept


def choice(pair: Pair, longest: Timers, target: float | None) -> Choice:
    """Describes a pair with its limits."""
    technique, reboot = pair.technique, pair.reboot
    meets_target = target is None or pair.availability >= target
    vmm_interval_min_s = os_interval_min_s = None
    if target is not None and meets_target:
        vmm_interval_min_s = _shortest_interval(
            lambda vmm_s: availability(technique, reboot, Timers(vmm_s, longest.os_interval_s)) - target,
            MIN_INTERVAL_PER_DOWNTIME * max(technique.vmm_downtime_s, 1.0),
            longest.vmm_interval_s,
            vmm_breaks(technique, longest.os_interval_s, longest.vmm_interval_s),
        )
        lowest_os_s = MIN_INTERVAL_PER_DOWNTIME * max(reboot.downtime_s, 1.0)
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
    """Returns for a coupled technique the longest VMM interval, in s, with one OS reboot less than chosen."""
    breaks = vmm_breaks(technique, choice.os_interval_s, choice.vmm_interval_s)
    return math.nextafter(breaks[-1], 0.0) if breaks else None


def _shortest_interval(
    surplus: Callable[[float], float], lowest_s: float, longest_s: float, breaks: list[float]
) -> float:
    """Returns the shortest interval from which on, up to `longest_s`, the surplus over the target is at least 0."""
    if lowest_s >= longest_s:
        return longest_s
    found = crossings(surplus, lowest_s, longest_s, breaks)
    return found[-1].at if found else lowest_s
