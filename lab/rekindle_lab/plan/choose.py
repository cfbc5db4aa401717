"""Technique and intervals of a VM: the pair of techniques with the highest availability, as seldom as aging allows.

Failures are not in the model, so every renewal only costs: the longest intervals that aging allows are the best, and
shorter ones are possible down to where the target is missed. Those limits are told.
"""

import math
from dataclasses import dataclass
from functools import cache

from rekindle_lab.models.availability import availability, nines
from rekindle_lab.models.crossing import crossings, os_breaks, vmm_breaks
from rekindle_lab.models.parameters import OsReboot, Technique, Timers
from rekindle_lab.models.throughput import performance

SHORTEST = 20
"""An interval is at least so many times the downtime."""


@dataclass(frozen=True)
class Choice:
    """For one VM. Intervals are seconds, shares go to 1."""

    vmm: str
    os: str
    coupled: bool
    vmm_interval_s: float
    os_interval_s: float
    availability: float
    performance: float
    meets: bool
    vmm_interval_min_s: float | None
    """Down to here the target would be met too, the OS's interval as it is; `None` where it is not met or not given."""
    os_interval_min_s: float | None

    @property
    def nines(self) -> int:
        """Of the availability."""
        return nines(self.availability)


@cache
def choose(
    vmm: tuple[Technique, ...], os: tuple[tuple[str, OsReboot], ...], longest: Timers, target: float | None
) -> Choice:
    """The best of the techniques given, in their order where several are equal."""
    pairs = [
        (availability(technique, reboot, longest), technique, name, reboot) for technique in vmm for name, reboot in os
    ]
    up, technique, name, reboot = max(pairs, key=lambda pair: pair[0])
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
        name,
        technique.coupled,
        longest.vmm_interval_s,
        longest.os_interval_s,
        up,
        performance(technique, reboot, longest),
        meets,
        *limits,
    )


def before_an_os_reboot(technique: Technique, choice: Choice) -> float | None:
    """Of a coupled technique: the longest VMM interval, in s, into which one OS reboot less falls than chosen."""
    edges = vmm_breaks(technique, choice.os_interval_s, choice.vmm_interval_s)
    return math.nextafter(edges[-1], 0.0) if edges else None


def _shortest(difference, low: float, high: float, breaks: list[float]) -> float:  # noqa: ANN001
    """From where on, up to `high`, a difference is at least 0 throughout."""
    if low >= high:
        return high
    found = crossings(difference, low, high, breaks)
    return found[-1].at if found else low
