"""The closed forms: compared with the numbers that RootHammer prints, and the points at which techniques overtake each
other."""

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
    assert nines(value) == count


def test_a_coupled_technique_counts_only_whole_intervals_of_the_os():
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
    (place,) = crossing.in_hosts(CLUSTER, "cold", migration)
    assert 11_000 <= place.at < 11_500
    # Below that number of hosts cold has the higher index, above it migration.
    assert index_of(CLUSTER, migration, 10_000) < index_of(CLUSTER, "cold", 10_000)
    assert index_of(CLUSTER, "cold", 10_000) < index_of(CLUSTER, "cold", 12_000) + 1e-12
    assert index_of(CLUSTER, migration, 12_000) > index_of(CLUSTER, "cold", 12_000)


@pytest.mark.parametrize("migration", ["migration", "live"])
def test_the_solved_crossing_is_the_analytical_one(migration):
    (place,) = crossing.in_hosts(CLUSTER, "cold", migration)

    def performance(name):
        return throughput.performance(CLUSTER.technique(name), CLUSTER.os, CLUSTER.timers)

    # (m - 1) / m * performance(migration) = performance(cold), solved for m hosts.
    assert place.at == pytest.approx(performance(migration) / (performance(migration) - performance("cold")), rel=1e-6)


def test_adaptive_live_migration_overtakes_cold_far_later():
    (place,) = crossing.in_hosts(CLUSTER, "cold", "live-adaptive")
    assert place.at > 20_000


@pytest.mark.parametrize("other", ["cold", "migration", "live", "live-adaptive"])
def test_warm_is_never_overtaken(other):
    assert crossing.in_hosts(CLUSTER, "warm", other) == []


def test_warm_does_not_depend_on_the_number_of_hosts():
    assert index_of(CLUSTER, "warm", 2) == pytest.approx(index_of(CLUSTER, "warm", 1e6), rel=1e-12)


def test_a_technique_with_two_spare_hosts_needs_three():
    pair = Technique("pair", 0, 0.57, 181, spare_hosts=2)
    parameters = Parameters("x", CLUSTER.os, CLUSTER.techniques | {"pair": pair})
    (place,) = crossing.in_hosts(parameters, "cold", "pair")
    (with_one_spare,) = crossing.in_hosts(parameters, "cold", "live")
    assert place.at == pytest.approx(2 * with_one_spare.at, rel=1e-6)
    assert figures.figure_16(parameters)["hosts"].min() == 3


def test_intervals_shorter_than_a_renewal_are_not_searched():
    # A quarter of a day is shorter than the renewal by `a`; a 28th of the interval is not.
    parameters = Parameters("y", OsReboot(34), {"a": Technique("a", 40_000), "b": Technique("b", 30_000, coupled=True)})
    low_s, high_s = DAY_S / 28, 4 * DAY_S
    places = crossing.in_vmm_interval(parameters, "a", "b", low_s, high_s)
    assert all(40_000 < place.at < high_s for place in places)
    assert figures.figure_10(parameters)["vmm_interval_d"].min() * DAY_S > 40_000


def test_the_difference_changes_its_sign_at_each_crossing():
    # With rare OS reboots cold is better than saved; with frequent OS reboots cold's timer reset saves some of them.
    saved, cold = Technique("saved", 900), Technique("cold", 1000, coupled=True)
    parameters = Parameters("x", OsReboot(300), {"saved": saved, "cold": cold})

    def difference(os_interval_s):
        timers = Timers(28 * DAY_S, os_interval_s)
        return availability_of(parameters, "saved", timers) - availability_of(parameters, "cold", timers)

    places = crossing.in_os_interval(parameters, "saved", "cold", DAY_S, 40 * DAY_S)
    assert places
    for place in places:
        before, after = difference(place.at * (1 - 1e-6)), difference(place.at * (1 + 1e-6))
        assert before * after < 0
        assert place.jump or abs(before + after) < 1e-9
    assert any(place.jump for place in places)
    assert any(not place.jump for place in places)


def test_crossings_of_known_functions():
    assert [round(place.at, 9) for place in crossing.crossings(lambda x: (x - 2) * (x - 5), 1, 10)] == [2, 5]
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
