"""Techniques and intervals of a host's VMs: the pairs with the highest availability that keep the capacity, too.

Failures are not in the model, so a renewal has only costs. The longest intervals that aging allows are therefore the
best; shorter ones are possible until the target is missed. The result includes those limits.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle_lab.models.availability import availability, nines
from rekindle_lab.models.crossing import crossings, os_breaks, vmm_breaks
from rekindle_lab.models.parameters import OsReboot, Technique, Timers
from rekindle_lab.models.throughput import performance

SHORTEST = 20
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
    found = []
    for technique in vmm:
        ways = (Pair(technique, name, reboot, availability(technique, reboot, longest)) for name, reboot in os)
        found.append(max(ways, key=lambda pair: pair.availability))
    found.sort(key=lambda pair: -pair.availability)
    return tuple(pair for pair in found if target is None or pair.availability >= target) or tuple(found)


@dataclass(frozen=True)
class _Part:
    """Pairs for the first kinds of a host's VMs: how long the host is unavailable, and the sum of availabilities."""

    away_s: float
    up: float
    taken: tuple[Pair, ...]


def best(
    kinds: Sequence[tuple[Sequence[Pair], int]],
    with_vms: Callable[[float, float, int], float],
    keeps: Callable[[float], bool],
) -> tuple[tuple[Pair, ...], float]:
    """Returns a pair for each kind of a host's VMs, and how long the host is unavailable with these pairs.

    Chooses the largest sum of availabilities among the combinations with which the host is unavailable for so short a
    time that `keeps` holds; without such a combination, the best pair of each kind. `kinds`: pairs of each kind, the
    best first, and the number of its VMs. `with_vms`: how long a host is unavailable, from that time without these VMs,
    the time of each VM, and their number. `keeps`: whether the capacity is kept; must hold for all shorter times, too.
    """
    away_s = 0.0
    for choices, count in kinds:
        away_s = with_vms(away_s, choices[0].technique.away_s, count)
    wanted = _Part(away_s, 0.0, tuple(choices[0] for choices, _ in kinds))
    found = wanted if keeps(away_s) else _best_that_keeps(kinds, with_vms, keeps) or wanted
    return found.taken, found.away_s


def _best_that_keeps(
    kinds: Sequence[tuple[Sequence[Pair], int]],
    with_vms: Callable[[float, float, int], float],
    keeps: Callable[[float], bool],
) -> _Part | None:
    parts = [_Part(0.0, 0.0, ())]
    for choices, count in kinds:
        longer = (
            _Part(
                with_vms(part.away_s, pair.technique.away_s, count),
                part.up + count * pair.availability,
                (*part.taken, pair),
            )
            for part in parts
            for pair in choices
        )
        # Keeps a part unless another one has a shorter time and a higher availability.
        parts = []
        for part in sorted((one for one in longer if keeps(one.away_s)), key=lambda one: (one.away_s, -one.up)):
            if not parts or part.up > parts[-1].up:
                parts.append(part)
    return parts[-1] if parts else None


def choice(pair: Pair, longest: Timers, target: float | None) -> Choice:
    """Describes a pair with its limits."""
    technique, reboot, up = pair.technique, pair.reboot, pair.availability
    meets = target is None or up >= target
    limits: tuple[float | None, float | None] = (None, None)
    if target is not None and meets:
        limits = (
            _shortest(
                lambda s: availability(technique, reboot, Timers(s, longest.os_interval_s)) - target,
                SHORTEST * max(technique.vmm_downtime_s, 1.0),
                longest.vmm_interval_s,
                vmm_breaks(technique, longest.os_interval_s, longest.vmm_interval_s),
            ),
            _shortest(
                lambda s: availability(technique, reboot, Timers(longest.vmm_interval_s, s)) - target,
                SHORTEST * max(reboot.downtime_s, 1.0),
                longest.os_interval_s,
                os_breaks(technique, longest.vmm_interval_s, SHORTEST * max(reboot.downtime_s, 1.0)),
            ),
        )
    return Choice(
        technique.name,
        pair.os,
        technique.coupled,
        longest.vmm_interval_s,
        longest.os_interval_s,
        up,
        performance(technique, reboot, longest),
        meets,
        *limits,
    )


def before_an_os_reboot(technique: Technique, choice: Choice) -> float | None:
    """Returns for a coupled technique the longest VMM interval, in s, with one OS reboot less than chosen."""
    edges = vmm_breaks(technique, choice.os_interval_s, choice.vmm_interval_s)
    return math.nextafter(edges[-1], 0.0) if edges else None


def _shortest(difference, low: float, high: float, breaks: list[float]) -> float:  # noqa: ANN001
    """Returns the least value from which on, up to `high`, a difference is at least 0 throughout."""
    if low >= high:
        return high
    found = crossings(difference, low, high, breaks)
    return found[-1].at if found else low
