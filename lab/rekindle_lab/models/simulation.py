"""Simulates the rejuvenation timers of RootHammer's figures 2 and 3, to check the closed forms and their assumptions.

A VM has two timers, each of which starts an outage:

    VMM timer ──> VMM_DUE: start_renewal ──(D(n))──> VMM_DONE: end_renewal ──> degraded for a time, timer restarts
    OS timer  ──> OS_DUE:  start_reboot  ──(D_os)──> OS_DONE:  end_reboot  ──> degraded for a time, timer restarts

While the VMM is renewed, the VM is down and its OS timer stands still (`Rules.os_timer_stops`); an OS reboot under way
is then delayed, not lost. A coupled technique reboots the guests with the VMM: the OS timer restarts
(`Rules.coupled_resets`), and the renewal waits for an OS reboot and its degraded time to end. Degraded time passes only
while the VM is up.

Entry point: `simulate`. `_Vm` has the state of one VM and a method for each event; time jumps from event to event.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from scipy import stats

from rekindle_lab.models.parameters import OsReboot, Technique, Timers


@dataclass(frozen=True)
class Rules:
    """The paper's assumptions. Each can be turned off to measure its effect."""

    os_timer_stops: bool = True
    """Whether the timer of the OS stands still while the VMM is renewed."""
    coupled_resets: bool = True
    """Whether a coupled renewal of the VMM restarts the timer of the OS."""


@dataclass(frozen=True)
class Estimate:
    """A simulated mean with its confidence interval; all are shares of time or throughput, to 1."""

    mean: float
    low: float
    high: float
    n: int

    def contains(self, value: float) -> bool:
        """Returns whether the interval contains `value`."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Simulated:
    """The results of a simulation."""

    availability: Estimate
    performance: Estimate


class _Event(IntEnum):
    """What happens to a VM."""

    VMM_DUE = 0
    VMM_DONE = 1
    OS_DUE = 2
    OS_DONE = 3


class _Queued(NamedTuple):
    """An event of the queue; `ticket` numbers events, so that those of the same time keep their order."""

    due_s: float
    ticket: int
    event: _Event


class _Delayed(NamedTuple):
    """An event that waits for the end of a renewal of the VMM."""

    left_s: float
    event: _Event


@dataclass
class _Degradation:
    """A degradation under way."""

    lost_share: float
    left_s: float


@dataclass
class _Vm:
    """The state of one simulated VM. Times are seconds."""

    technique: Technique
    os: OsReboot
    timers: Timers
    rules: Rules
    variation: float
    """Standard deviation of every duration over its mean."""
    generator: np.random.Generator
    now: float = 0.0
    down: float = 0.0
    """Time down so far."""
    lost: float = 0.0
    """Throughput lost so far while the VM was up: degraded time, each multiplied with the share that was lost."""
    renewing: bool = False
    """Whether the VMM is being renewed."""
    rebooting: bool = False
    """Whether the OS is being rebooted; a renewal of the VMM may delay that reboot."""
    degradations: list[_Degradation] = field(default_factory=list)
    queue: list[_Queued] = field(default_factory=list)
    last_ticket: int = 0
    os_event: _Queued | None = None
    """The OS's next event. Events of the OS with another ticket are void."""
    delayed: _Delayed | None = None
    """The OS's next event while the VMM is renewed."""
    renewal_began: float = 0.0
    """Start of the renewal of the VMM."""
    reboot_began: float = 0.0
    """Start of the OS reboot under way, shifted by the renewals of the VMM since then."""
    renewal_scheduled: float = 0.0
    """When the renewal of the VMM was due: a delay does not shift the next renewal."""

    def draw_duration(self, mean: float) -> float:
        """Returns a random duration with this mean, and with a standard deviation of `variation` times the mean."""
        if mean == 0 or self.variation == 0:
            return mean
        # The gamma distribution has no negative durations; its mean over its deviation is the root of its shape.
        shape = 1 / self.variation**2
        return float(self.generator.gamma(shape, mean / shape))

    def push(self, due_s: float, event: _Event) -> None:
        """Queues an event; an event of the OS replaces the one that was queued before."""
        self.last_ticket += 1
        queued = _Queued(due_s, self.last_ticket, event)
        heapq.heappush(self.queue, queued)
        if event in (_Event.OS_DUE, _Event.OS_DONE):
            self.os_event = queued

    def advance(self, to: float) -> None:
        """Advances the time to `to`, and adds up the losses until then."""
        passed = to - self.now
        self.now = to
        if self.renewing or self.rebooting:
            self.down += passed
            return
        for degradation in self.degradations:
            degraded_s = min(degradation.left_s, passed)
            self.lost += degradation.lost_share * degraded_s
            degradation.left_s -= degraded_s
        self.degradations = [degradation for degradation in self.degradations if degradation.left_s > 0]

    def start(self) -> None:
        """Starts both timers at random points of their intervals."""
        self.renewal_scheduled = float(self.generator.uniform(0, self.timers.vmm_interval_s))
        self.push(self.renewal_scheduled, _Event.VMM_DUE)
        self.push(float(self.generator.uniform(0, self.timers.os_interval_s)), _Event.OS_DUE)

    def step(self) -> None:
        """Processes the next event, which must be due at `now`."""
        queued = heapq.heappop(self.queue)
        is_of_os = queued.event in (_Event.OS_DUE, _Event.OS_DONE)
        if is_of_os and (self.os_event is None or self.os_event.ticket != queued.ticket):
            return
        steps = {
            _Event.VMM_DUE: self.start_renewal,
            _Event.VMM_DONE: self.end_renewal,
            _Event.OS_DUE: self.start_reboot,
            _Event.OS_DONE: self.end_reboot,
        }
        steps[queued.event]()

    def start_renewal(self) -> None:
        """Takes the VM down for the renewal of its VMM. A coupled renewal waits until the OS is not rebooting."""
        os_idle_at = self.now + self.os_busy_s()
        if self.technique.coupled and os_idle_at > self.now:  # the rest may be shorter than the clock's resolution
            self.push(os_idle_at, _Event.VMM_DUE)
            return
        self.renewing, self.renewal_began = True, self.now
        if self.os_event is not None and (self.rules.os_timer_stops or self.rebooting):
            self.delayed = _Delayed(self.os_event.due_s - self.now, self.os_event.event)
            self.os_event = None
        self.push(self.now + self.draw_duration(self.technique.vmm_downtime_s), _Event.VMM_DONE)

    def os_busy_s(self) -> float:
        """Returns the remaining seconds of an OS reboot with its degraded time."""
        wait = max((degradation.left_s for degradation in self.degradations), default=0.0)
        if self.rebooting and self.os_event is not None:
            wait = max(wait, self.os.degraded_s) + self.os_event.due_s - self.now
        return wait

    def end_renewal(self) -> None:
        """Ends the renewal: the VM is up, degraded at first; the VMM timer restarts, the OS timer too or continues."""
        self.renewing = False
        self.reboot_began += self.now - self.renewal_began  # matters only to a reboot that was delayed
        self.degradations.append(_Degradation(self.technique.degraded_rate, self.technique.degraded_s))
        if self.technique.coupled and self.rules.coupled_resets:
            self.push(self.now + self.timers.os_interval_s, _Event.OS_DUE)
        elif self.delayed is not None:
            self.push(self.now + self.delayed.left_s, self.delayed.event)
        self.delayed = None
        self.renewal_scheduled += self.timers.vmm_interval_s
        self.push(max(self.renewal_scheduled, self.now), _Event.VMM_DUE)

    def start_reboot(self) -> None:
        """Takes the VM down for the reboot of its OS."""
        if self.renewing:  # only if the timer does not stop: the guest is down, and is rebooted once it is up
            self.os_event = None
            self.delayed = _Delayed(0.0, _Event.OS_DUE)
            return
        self.rebooting = True
        self.reboot_began = self.now
        self.push(self.now + self.draw_duration(self.os.downtime_s), _Event.OS_DONE)

    def end_reboot(self) -> None:
        """Ends the reboot of the OS; the VM is up again, degraded at first, and the OS timer restarts."""
        # The interval starts with the reboot, as in N = T_vmm / T_os.
        self.rebooting = False
        self.degradations.append(_Degradation(self.os.degraded_rate, self.os.degraded_s))
        took_s = self.now - self.reboot_began
        self.push(self.now + max(0.0, self.timers.os_interval_s - took_s), _Event.OS_DUE)

    def run(self, until: float) -> None:
        """Processes all events until that time."""
        while self.queue and self.queue[0].due_s <= until:
            self.advance(self.queue[0].due_s)
            self.step()
        self.advance(until)


class _Shares(NamedTuple):
    """Results of one VM, to 1."""

    availability: float
    performance: float


def simulate_vm(
    technique: Technique,
    os: OsReboot,
    timers: Timers,
    generator: np.random.Generator,
    *,
    intervals: int,
    variation: float = 0.2,
    rules: Rules | None = None,
) -> _Shares:
    """Simulates one VM over `intervals` VMM intervals, after two more that are not counted: they may be unlike."""
    vm = _Vm(technique, os, timers, rules or Rules(), variation, generator)
    vm.start()
    settled_s = 2 * timers.vmm_interval_s
    vm.run(settled_s)
    down_before, lost_before = vm.down, vm.lost
    length_s = intervals * timers.vmm_interval_s
    vm.run(settled_s + length_s)
    share_of_time_up = 1 - (vm.down - down_before) / length_s
    return _Shares(availability=share_of_time_up, performance=share_of_time_up - (vm.lost - lost_before) / length_s)


def simulate(
    technique: Technique,
    os: OsReboot,
    timers: Timers,
    *,
    vms: int = 100,
    intervals: int = 20,
    variation: float = 0.2,
    seed: int = 1,
    confidence: float = 0.99,
    rules: Rules | None = None,
) -> Simulated:
    """Simulates independent VMs; returns the means over them, with intervals of this confidence.

    `intervals`: number of VMM intervals of each VM; `variation`: standard deviation of every duration over its mean.
    """
    generators = np.random.default_rng(seed).spawn(vms)
    results = [
        simulate_vm(technique, os, timers, generator, intervals=intervals, variation=variation, rules=rules)
        for generator in generators
    ]
    return Simulated(
        estimate([result.availability for result in results], confidence),
        estimate([result.performance for result in results], confidence),
    )


def estimate(values: Sequence[float], confidence: float) -> Estimate:
    """Returns the mean of the values with its interval by Student's t."""
    mean, standard_error = float(np.mean(values)), float(stats.sem(values))
    half_width = standard_error * float(stats.t.ppf((1 + confidence) / 2, len(values) - 1))
    if not math.isfinite(half_width):  # a single value
        return Estimate(mean, low=0, high=1, n=1)
    # The precision of sums of a few million seconds is about this.
    half_width = max(half_width, 1e-12)
    return Estimate(mean, mean - half_width, mean + half_width, len(values))
