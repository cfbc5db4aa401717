"""The closed forms of RootHammer's models, compared with the numbers that the paper prints.

A technique (warm, saved, cold, migration, live) is a way to renew a VMM. Availability is the share of time in which a
VM is up; the index is the throughput of a cluster as a share of that without renewals. A crossing is the point at which
one technique overtakes another. A coupled technique (cold) reboots the OS with the VMM, so that only whole intervals of
the OS count: a floor in the equations, at which availability jumps.
"""

import math

import pytest
from papers import CLUSTER, JBOSS, availability_of, index_of

from rekindle_lab.models import crossing, figures, throughput
from rekindle_lab.models.availability import availability, downtime_s, nines, os_reboots
from rekindle_lab.models.parameters import DAY_S, OsReboot, ParameterError, Parameters, Technique, Timers


def test_availability_of_section_5_5():
    computed = {name: availability_of(JBOSS, name) for name in ("warm", "cold", "saved")}
    assert {name: round(value, 5) for name, value in computed.items()} == {
        "warm": 0.99993,
        "cold": 0.99986,
        # The paper prints 0.99977. Its formula with its own figures gives 0.999764.
        "saved": 0.99976,
    }
    # All three printed numbers follow from the formula if the fifth digit is rounded up.
    printed = {"warm": 0.99993, "cold": 0.99986, "saved": 0.99977}
    assert {name: math.ceil(value * 1e5) / 1e5 for name, value in computed.items()} == printed
    assert {name: nines(value) for name, value in computed.items()} == {"warm": 4, "cold": 3, "saved": 3}


@pytest.mark.parametrize(("value", "count"), [(0.999, 3), (0.99899, 2), (0.9, 1), (0.5, 0), (-1, 0), (1.0, 99)])
def test_nines(value, count):
    """0.999 has three, although its binary fraction is just below; 99 stands for infinitely many."""
    assert nines(value) == count


def test_a_coupled_technique_counts_only_whole_intervals_of_the_os():
    """4 OS intervals of 7 days fit in the 28 days of the VMM, but for the 43 s or 243 s of its renewal."""
    warm, cold = JBOSS.technique("warm"), JBOSS.technique("cold")
    assert os_reboots(warm, JBOSS.timers) == pytest.approx((28 * DAY_S - 43) / (7 * DAY_S))
    assert os_reboots(cold, JBOSS.timers) == 3


def test_an_os_interval_longer_than_that_of_the_vmm_leaves_only_the_coupled_reboot():
    timers, cold = Timers(vmm_interval_s=7 * DAY_S, os_interval_s=28 * DAY_S), JBOSS.technique("cold")
    assert os_reboots(cold, timers) == 0
    assert downtime_s(cold, JBOSS.os, timers) == 243


def test_warm_is_highest_and_saved_lowest_in_figures_9_and_10():
    for table in (figures.figure_9(JBOSS), figures.figure_10(JBOSS)):
        assert (table["warm_availability"] > table["cold_availability"]).all()
        assert (table["warm_availability"] > table["saved_availability"]).all()
    assert (figures.figure_9(JBOSS)["saved_availability"] < figures.figure_9(JBOSS)["cold_availability"]).all()


@pytest.mark.parametrize("migration", ["migration", "live"])
def test_migration_overtakes_cold_near_the_11000_hosts_of_section_6_3(migration):
    """Migration keeps one host empty, which matters less in larger clusters; the paper prints "about 11000"."""
    (point,) = crossing.in_hosts(CLUSTER, "cold", migration)
    assert 11_000 <= point.at < 11_500
    # Below that number of hosts cold has the higher index, above it migration.
    assert index_of(CLUSTER, migration, 10_000) < index_of(CLUSTER, "cold", 10_000)
    assert index_of(CLUSTER, "cold", 10_000) < index_of(CLUSTER, "cold", 12_000) + 1e-12
    assert index_of(CLUSTER, migration, 12_000) > index_of(CLUSTER, "cold", 12_000)


@pytest.mark.parametrize("migration", ["migration", "live"])
def test_the_solved_crossing_is_the_analytical_one(migration):
    (point,) = crossing.in_hosts(CLUSTER, "cold", migration)

    def performance(name):
        return throughput.performance(CLUSTER.technique(name), CLUSTER.os, CLUSTER.timers)

    # (m - 1) / m * performance(migration) = performance(cold), solved for m hosts.
    assert point.at == pytest.approx(performance(migration) / (performance(migration) - performance("cold")), rel=1e-6)


def test_adaptive_live_migration_overtakes_cold_far_later():
    """It degrades guests less, but for 950 s instead of 181 s."""
    (point,) = crossing.in_hosts(CLUSTER, "cold", "live-adaptive")
    assert point.at > 20_000


@pytest.mark.parametrize("other", ["cold", "migration", "live", "live-adaptive"])
def test_warm_is_never_overtaken(other):
    assert crossing.in_hosts(CLUSTER, "warm", other) == []


def test_warm_does_not_depend_on_the_number_of_hosts():
    """It keeps no host empty."""
    assert index_of(CLUSTER, "warm", 2) == pytest.approx(index_of(CLUSTER, "warm", 1e6), rel=1e-12)


def test_a_technique_with_two_spare_hosts_needs_three():
    """Two empty hosts instead of one: the same loss per host is reached in a cluster of twice the size."""
    pair = Technique("pair", vmm_downtime_s=0, degraded_rate=0.57, degraded_s=181, spare_hosts=2)  # as live, but for 2
    parameters = Parameters("x", CLUSTER.os, CLUSTER.techniques | {"pair": pair})
    (point,) = crossing.in_hosts(parameters, "cold", "pair")
    (with_one_spare,) = crossing.in_hosts(parameters, "cold", "live")
    assert point.at == pytest.approx(2 * with_one_spare.at, rel=1e-6)
    assert figures.figure_16(parameters)["hosts"].min() == 3


def test_intervals_shorter_than_a_renewal_are_not_searched():
    # A quarter of a day is shorter than the renewal by `a`; a 28th of the interval is not.
    techniques = {
        "a": Technique("a", vmm_downtime_s=40_000),
        "b": Technique("b", vmm_downtime_s=30_000, coupled=True),
    }
    parameters = Parameters("y", OsReboot(34), techniques)
    low_s, high_s = DAY_S / 28, 4 * DAY_S
    points = crossing.in_vmm_interval(parameters, "a", "b", low_s=low_s, high_s=high_s)
    assert all(40_000 < point.at < high_s for point in points)
    assert figures.figure_10(parameters)["vmm_interval_d"].min() * DAY_S > 40_000


def test_the_difference_changes_its_sign_at_each_crossing():
    """Of two techniques that overtake each other several times, some crossings are zeros, others jumps at a floor."""
    # With rare OS reboots cold is better than saved; with frequent OS reboots cold's timer reset saves some of them.
    saved, cold = Technique("saved", vmm_downtime_s=900), Technique("cold", vmm_downtime_s=1000, coupled=True)
    parameters = Parameters("x", OsReboot(300), {"saved": saved, "cold": cold})

    def difference(os_interval_s):
        timers = Timers(28 * DAY_S, os_interval_s)
        return availability_of(parameters, "saved", timers) - availability_of(parameters, "cold", timers)

    points = crossing.in_os_interval(parameters, "saved", "cold", low_s=DAY_S, high_s=40 * DAY_S)
    assert points
    for point in points:
        before, after = difference(point.at * (1 - 1e-6)), difference(point.at * (1 + 1e-6))
        assert before * after < 0
        assert point.jump or abs(before + after) < 1e-9
    assert any(point.jump for point in points)
    assert any(not point.jump for point in points)


def test_crossings_of_known_functions():
    """A parabola with zeros at 2 and 5; a step function that jumps over 0 at 4; a function without a zero."""
    assert [round(point.at, 9) for point in crossing.crossings(lambda x: (x - 2) * (x - 5), 1, 10)] == [2, 5]
    (jump,) = crossing.crossings(lambda x: math.floor(x) - 3.5, 1, 10, breaks=range(1, 11))
    assert (jump.at, jump.jump) == (4, True)
    assert crossing.crossings(lambda x: x, 1, 10) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OsReboot(-1), r"os\.downtime_s: -1; it must be 0 or more"),
        (lambda: Technique("x", 1, 2), r"technique\.x\.degraded_rate: 2; it must be 0 to 1"),
        (lambda: Timers(float("nan"), 1), "vmm_interval_s: nan is not a finite number"),
        (
            lambda: availability(Technique("x", 50), OsReboot(1), Timers(40, 10)),
            r"vmm_downtime_s: 50; it must be less than vmm_interval_s \(40\)",
        ),
        (lambda: index_of(CLUSTER, "live", 1), "hosts: 1; live keeps 1 empty"),
        (lambda: JBOSS.technique("hot"), "no technique 'hot'"),
    ],
)
def test_impossible_parameters_are_named(make, message):
    with pytest.raises(ParameterError, match=message):
        make()
