"""Simulates the rejuvenation timers of figures 2 and 3, to check the closed forms and the assumptions behind them.

A VM has two timers. While the VMM is renewed, the VM is down and its OS timer stands still (`Rules.os_timer_stops`);
an OS reboot under way is then delayed, not lost. A coupled technique reboots the guests with the VMM: the OS timer
restarts (`Rules.coupled_resets`), and the renewal waits for an OS reboot and its degraded time to end. Degraded
time passes only while the VM is up.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    def holds(self, value: float) -> bool:
        """Returns whether the interval contains `value`."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Simulated:
    """The results of a simulation."""

    availability: Estimate
    performance: Estimate


VMM_DUE, VMM_DONE, OS_DUE, OS_DONE = range(4)


@dataclass
class _Vm:
    """The state of one simulated VM. Times are seconds."""

    technique: Technique
    os: OsReboot
    timers: Timers
    rules: Rules
    variation: float
    generator: np.random.Generator
    now: float = 0.0
    down: float = 0.0
    lost: float = 0.0
    renewing: bool = False
    """Whether the VMM is being renewed."""
    rebooting: bool = False
    """Whether the OS is being rebooted; a renewal of the VMM may delay that reboot."""
    windows: list[list[float]] = field(default_factory=list)
    """Degradations under way: share lost, and seconds left."""
    queue: list[tuple[float, int, int]] = field(default_factory=list)
    ticket: int = 0
    os_event: tuple[int, float, int] | None = None
    """Ticket, time and kind of the OS's next event. Events of the OS with another ticket are void."""
    held: tuple[float, int] | None = None
    """The OS's next event, delayed while the VMM is renewed: seconds left until the event, and its kind."""
    away_since: float = 0.0
    """Start of the renewal of the VMM."""
    began: float = 0.0
    """Start of the OS reboot under way, shifted by the renewals of the VMM since then."""
    scheduled: float = 0.0
    """When the renewal of the VMM was due: a delay does not shift the next renewal."""

    def spread(self, mean: float) -> float:
        """Returns a random duration with this mean, and with a standard deviation of `variation` times the mean."""
        if mean == 0 or self.variation == 0:
            return mean
        shape = 1 / self.variation**2
        return float(self.generator.gamma(shape, mean / shape))

    def push(self, at: float, kind: int) -> None:
        self.ticket += 1
        heapq.heappush(self.queue, (at, self.ticket, kind))
        if kind in (OS_DUE, OS_DONE):
            self.os_event = (self.ticket, at, kind)

    def advance(self, to: float) -> None:
        """Advances the time to `to`, and adds up the losses until then."""
        passed = to - self.now
        self.now = to
        if self.renewing or self.rebooting:
            self.down += passed
            return
        for window in self.windows:
            used = min(window[1], passed)
            self.lost += window[0] * used
            window[1] -= used
        self.windows = [window for window in self.windows if window[1] > 0]

    def start(self) -> None:
        """Starts both timers at random points of their intervals."""
        self.scheduled = float(self.generator.uniform(0, self.timers.vmm_interval_s))
        self.push(self.scheduled, VMM_DUE)
        self.push(float(self.generator.uniform(0, self.timers.os_interval_s)), OS_DUE)

    def step(self) -> None:
        """Processes the next event, which must be due at `now`."""
        _, ticket, kind = heapq.heappop(self.queue)
        if kind in (OS_DUE, OS_DONE) and (self.os_event is None or self.os_event[0] != ticket):
            return
        (self.vmm_due, self.vmm_done, self.os_due, self.os_done)[kind]()

    def vmm_due(self) -> None:
        free = self.now + self.busy_s()
        if self.technique.coupled and free > self.now:  # the rest may be shorter than the clock's resolution
            self.push(free, VMM_DUE)
            return
        self.renewing, self.away_since = True, self.now
        if self.os_event is not None and (self.rules.os_timer_stops or self.rebooting):
            _, at, kind = self.os_event
            self.held, self.os_event = (at - self.now, kind), None
        self.push(self.now + self.spread(self.technique.vmm_downtime_s), VMM_DONE)

    def busy_s(self) -> float:
        """Returns the remaining seconds of an OS reboot with its degraded time."""
        wait = max((window[1] for window in self.windows), default=0.0)
        if self.rebooting and self.os_event is not None:
            wait = max(wait, self.os.degraded_s) + self.os_event[1] - self.now
        return wait

    def vmm_done(self) -> None:
        self.renewing = False
        self.began += self.now - self.away_since  # matters only to a reboot that was delayed
        self.windows.append([self.technique.degraded_rate, self.technique.degraded_s])
        if self.technique.coupled and self.rules.coupled_resets:
            self.push(self.now + self.timers.os_interval_s, OS_DUE)
        elif self.held is not None:
            self.push(self.now + self.held[0], self.held[1])
        self.held = None
        self.scheduled += self.timers.vmm_interval_s
        self.push(max(self.scheduled, self.now), VMM_DUE)

    def os_due(self) -> None:
        if self.renewing:  # only if the timer does not stop: the guest is down, and is rebooted once it is up
            self.os_event = None
            self.held = (0.0, OS_DUE)
            return
        self.rebooting = True
        self.began = self.now
        self.push(self.now + self.spread(self.os.downtime_s), OS_DONE)

    def os_done(self) -> None:
        # The interval starts with the reboot, as in N = T_vmm / T_os.
        self.rebooting = False
        self.windows.append([self.os.degraded_rate, self.os.degraded_s])
        took = self.now - self.began
        self.push(self.now + max(0.0, self.timers.os_interval_s - took), OS_DUE)

    def live(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.advance(self.queue[0][0])
            self.step()
        self.advance(until)


def one_vm(
    technique: Technique,
    os: OsReboot,
    timers: Timers,
    generator: np.random.Generator,
    *,
    intervals: int,
    variation: float = 0.2,
    rules: Rules | None = None,
) -> tuple[float, float]:
    """Returns availability and performance (to 1) of one VM over `intervals` VMM intervals, after two to settle."""
    vm = _Vm(technique, os, timers, rules or Rules(), variation, generator)
    vm.start()
    settled = 2 * timers.vmm_interval_s
    vm.live(settled)
    down, lost = vm.down, vm.lost
    length = intervals * timers.vmm_interval_s
    vm.live(settled + length)
    up = 1 - (vm.down - down) / length
    return up, up - (vm.lost - lost) / length


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
    """Simulates independent VMs; `variation`: standard deviation of every duration over its mean."""
    generators = np.random.default_rng(seed).spawn(vms)
    lives = [
        one_vm(technique, os, timers, generator, intervals=intervals, variation=variation, rules=rules)
        for generator in generators
    ]
    return Simulated(*(estimate([life[i] for life in lives], confidence) for i in range(2)))


def estimate(values: Sequence[float], confidence: float) -> Estimate:
    """Returns the mean of the values with its interval by Student's t."""
    mean, error = float(np.mean(values)), float(stats.sem(values))
    half = error * float(stats.t.ppf((1 + confidence) / 2, len(values) - 1))
    # The precision of sums of a few million seconds is about this.
    half = max(half, 1e-12)
    return Estimate(mean, mean - half, mean + half, len(values)) if math.isfinite(half) else Estimate(mean, 0, 1, 1)
