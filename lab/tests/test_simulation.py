"""The simulation of the timers, compared with the closed forms. With other rules the two must not agree.

A technique renews (reboots) a VM's VMM at an interval; its OS is rebooted at another, shorter one. A closed form is
RootHammer's equation for the availability (share of time up) or the performance (share of throughput) of a VM. It
agrees if it is in the simulation's 99 % interval. A coupled technique reboots the OS with the VMM.
"""

import pytest
from papers import CLUSTER, JBOSS

from rekindle_lab.models import simulation
from rekindle_lab.models.availability import availability, downtime_s, os_reboots
from rekindle_lab.models.parameters import OsReboot, Technique, Timers
from rekindle_lab.models.simulation import Rules, simulate
from rekindle_lab.models.throughput import performance

# Downtimes so long that each rule has an effect far larger than the interval of a simulation.
HARSH_TIMERS = Timers(vmm_interval_s=10_000, os_interval_s=1_700)
HARSH_OS = OsReboot(downtime_s=100, degraded_rate=0.3, degraded_s=50)
WARM = Technique("warm", vmm_downtime_s=2_000, degraded_rate=0.5, degraded_s=200)
COLD = Technique("cold", vmm_downtime_s=1_000, degraded_rate=0.7, degraded_s=300, coupled=True)
LIVE = Technique("live", vmm_downtime_s=0, degraded_rate=0.4, degraded_s=900, spare_hosts=1)


def simulate_harsh(technique, **options):
    """Simulates a technique with the long downtimes above."""
    return simulate(technique, HARSH_OS, HARSH_TIMERS, vms=150, intervals=25, **options)


@pytest.mark.parametrize(
    "technique",
    [WARM, COLD, LIVE, *CLUSTER.techniques.values()],
    ids=lambda technique: f"{technique.name}-{technique.vmm_downtime_s:g}",
)
def test_it_agrees_with_the_closed_forms(technique):
    """Each technique, also with the paper's durations, under timers that are short enough for every rule to matter."""
    result = simulate_harsh(technique)
    assert result.availability.contains(availability(technique, HARSH_OS, HARSH_TIMERS)), result.availability
    assert result.performance.contains(performance(technique, HARSH_OS, HARSH_TIMERS)), result.performance
    assert result.availability.high - result.availability.low < 0.004  # so narrow that agreement is no chance


@pytest.mark.parametrize("parameters", [JBOSS, CLUSTER], ids=["jboss", "cluster"])
def test_it_agrees_with_the_closed_forms_for_the_papers_parameters(parameters):
    os, timers = parameters.os, parameters.timers
    for technique in parameters.techniques.values():
        result = simulate(technique, os, timers)
        assert result.availability.contains(availability(technique, os, timers)), (technique.name, result.availability)
        assert result.performance.contains(performance(technique, os, timers)), (technique.name, result.performance)


def test_it_disagrees_if_the_timer_of_the_os_keeps_running():
    result = simulate_harsh(WARM, rules=Rules(os_timer_stops=False))
    assert not result.availability.contains(availability(WARM, HARSH_OS, HARSH_TIMERS))


def test_it_disagrees_if_a_coupled_renewal_does_not_reset_the_timer_of_the_os():
    """Without the reset, the OS is rebooted as often as with a technique that is not coupled."""
    assert os_reboots(COLD, HARSH_TIMERS) == 5  # the floor of 9000 / 1700 = 5.29
    result = simulate_harsh(COLD, rules=Rules(coupled_resets=False))
    assert not result.availability.contains(availability(COLD, HARSH_OS, HARSH_TIMERS))
    not_coupled = availability(Technique("cold", 1_000), HARSH_OS, HARSH_TIMERS)
    assert result.availability.mean == pytest.approx(not_coupled, abs=0.002)


def test_a_waiting_renewal_starts_despite_a_rest_below_the_clocks_resolution(monkeypatch):
    """A renewal that waits for degraded time, of which less than the clock's resolution is left, must not wait forever.

    An endless loop would have far more steps than the few thousand of these simulations.
    """
    times_of_steps, step = [], simulation._Vm.step

    def counted_step(vm):
        times_of_steps.append(vm.now)
        assert len(times_of_steps) < 100_000, f"it stands still at {vm.now} s"
        step(vm)

    monkeypatch.setattr(simulation._Vm, "step", counted_step)
    cold = Technique("cold", vmm_downtime_s=1_000, coupled=True)
    os = OsReboot(downtime_s=100, degraded_rate=0.3, degraded_s=12.3)
    timers = Timers(vmm_interval_s=10_000, os_interval_s=2_990)
    result = simulate(cold, os, timers)
    # The third OS reboot coincides with the renewal: the reboot happens first, or is omitted.
    most_s = downtime_s(cold, os, timers)
    assert os_reboots(cold, timers) == 3
    assert 1 - most_s / 10_000 < result.availability.mean < 1 - (most_s - 100) / 10_000
