"""Computes the points at which one technique overtakes another: in hosts, and in either interval.

A technique is a way to renew (reboot) a VMM. A crossing is a point at which the difference of two techniques changes
its sign: at a smaller value the one is better, at a larger value the other.
A coupled technique reboots the guests' OS with the VMM. The number of further OS reboots in a VMM interval is whole (a
floor in the equations), so its availability jumps where that number changes: these points are the breaks.

`crossings` solves for any difference of two functions; `in_hosts`, `in_os_interval`, `in_vmm_interval` apply it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq

from rekindle_lab.models import throughput
from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import Parameters, Technique, Timers

POINTS_PER_PIECE = 64
"""Number of points per smooth piece at which the sign is compared: far more than the sign changes in a piece."""
INSIDE = 1e-12
"""Relative distance from a break at which the difference is evaluated, beyond the rounding of the break itself."""


@dataclass(frozen=True)
class Crossing:
    """A change of the difference's sign at `at`. With `jump` the difference skips 0 (a floor), otherwise it is 0."""

    at: float
    jump: bool = False


def crossings(
    difference: Callable[[float], float], low: float, high: float, breaks: Iterable[float] = ()
) -> list[Crossing]:
    """Returns all points between `low` and `high` (more than 0) at which `difference` changes its sign, in order.

    `breaks`: the points at which `difference` is not continuous. `POINTS_PER_PIECE` points at equal
    logarithmic distances divide the range between two breaks; between two points it must change its sign at most once.
    """
    if not 0 < low < high:
        raise ValueError(f"crossings need 0 < low < high, not {low:g} and {high:g}")
    edges = sorted({low, high, *(edge for edge in breaks if low < edge < high)})
    all_crossings: list[Crossing] = []
    sign_before = 0.0  # the last sign of the previous piece; 0: none yet
    for edge, next_edge in pairwise(edges):
        points = _points_inside(edge, next_edge)
        values = [difference(point) for point in points]
        signs = [math.copysign(1, value) for value in values if value != 0]
        if sign_before and signs and signs[0] != sign_before:
            all_crossings.append(Crossing(edge, jump=True))
        all_crossings += _crossings_of_piece(difference, points, values)
        sign_before = signs[-1] if signs else sign_before
    return all_crossings


def _points_inside(left: float, right: float) -> list[float]:
    """Divides a piece between two breaks, which it omits: a floor belongs to only one side of its break."""
    begin, end = math.nextafter(left, math.inf) * (1 + INSIDE), math.nextafter(right, 0.0) * (1 - INSIDE)
    return [begin, *np.geomspace(begin, end, POINTS_PER_PIECE)[1:-1].tolist(), end]


def _crossings_of_piece(
    difference: Callable[[float], float], points: Sequence[float], values: Sequence[float]
) -> list[Crossing]:
    """Returns the crossings in a piece without breaks; `values` are those of `difference` at `points`."""
    in_piece = []
    for (point, value), (next_point, next_value) in pairwise(zip(points, values, strict=True)):
        if value * next_value < 0:
            root = brentq(difference, point, next_point, xtol=1e-9 * next_point, rtol=1e-14)
            in_piece.append(Crossing(float(root)))
        elif next_value == 0 and value != 0:
            in_piece.append(Crossing(next_point))
    return in_piece


def in_hosts(parameters: Parameters, name: str, other_name: str, high: float = 1e7) -> list[Crossing]:
    """Returns the cluster sizes at which the throughputs of two techniques cross (section 6.3), in ascending order."""
    technique, other = parameters.technique(name), parameters.technique(other_name)
    low = throughput.fewest_hosts((technique, other))
    os, timers = parameters.os, parameters.timers
    return crossings(
        lambda hosts: throughput.index(technique, os, timers, hosts) - throughput.index(other, os, timers, hosts),
        low,
        high,
    )


def in_os_interval(
    parameters: Parameters, name: str, other_name: str, *, low_s: float, high_s: float
) -> list[Crossing]:
    """Returns the OS's intervals from `low_s` to `high_s` at which the availabilities cross (figure 9)."""
    technique, other = parameters.technique(name), parameters.technique(other_name)
    vmm_s = parameters.timers.vmm_interval_s
    breaks = [edge for coupled in (technique, other) for edge in os_breaks(coupled, vmm_s, low_s)]
    return crossings(lambda os_s: _difference(parameters, technique, other, Timers(vmm_s, os_s)), low_s, high_s, breaks)


def in_vmm_interval(
    parameters: Parameters, name: str, other_name: str, *, low_s: float, high_s: float
) -> list[Crossing]:
    """Returns the VMM's intervals from `low_s` to `high_s` at which the availabilities cross (figure 10).

    Omits intervals shorter than a renewal.
    """
    technique, other = parameters.technique(name), parameters.technique(other_name)
    low_s = max(low_s, technique.vmm_downtime_s, other.vmm_downtime_s)
    os_s = parameters.timers.os_interval_s
    breaks = [edge for coupled in (technique, other) for edge in vmm_breaks(coupled, os_s, high_s)]
    return crossings(
        lambda vmm_s: _difference(parameters, technique, other, Timers(vmm_s, os_s)), low_s, high_s, breaks
    )


def vmm_breaks(technique: Technique, os_s: float, high_s: float) -> list[float]:
    """Returns the VMM's intervals up to `high_s` at which the floor of a coupled technique steps, in order.

    The floor is that of (T_vmm - D) / T_os, so it steps at T_vmm = D + k T_os.
    """
    if not technique.coupled:
        return []
    edges = (technique.vmm_downtime_s + count * os_s for count in range(1, math.ceil(high_s / os_s) + 1))
    return [edge for edge in edges if edge <= high_s]


def os_breaks(technique: Technique, vmm_s: float, low_s: float) -> list[float]:
    """Returns the OS's intervals from `low_s` on at which that floor steps, at T_os = (T_vmm - D) / k."""
    if not technique.coupled:
        return []
    up_s = vmm_s - technique.vmm_downtime_s
    return [up_s / count for count in range(1, math.floor(up_s / low_s) + 1)]


def _difference(parameters: Parameters, technique: Technique, other: Technique, timers: Timers) -> float:
    return availability(technique, parameters.os, timers) - availability(other, parameters.os, timers)
