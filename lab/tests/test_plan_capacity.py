"""Which technique a plan chooses when the one with the highest availability does not keep the capacity.

- A technique renews (reboots) a VM's VMM or OS; a coupled one reboots the OS with the VMM.
- Capacity is the share of the hosts that must be available at any time; the hosts of a group must not be away at the
  same time. A host is away while one of its VMs is unavailable or degraded by a renewal.
"""

import itertools
import operator
import tomllib

import pytest
from invented_fleet import fleet

from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import DAY_S, Timers
from rekindle_lab.plan.command import make
from rekindle_lab.plan.fleet import parse
from rekindle_lab.plan.rolling import capacity_limits
from rekindle_lab.plan.timers import TICK_S

# "slow" has the highest availability, but is degraded for so long that 2 of 10 hosts are away at the same time. "quick"
# meets the target and keeps the capacity. "poor" keeps the capacity and misses the target.
CAPACITY = """
vmm_interval_max_d = 28
os_interval_max_d = 7
[target]
availability = 0.9999
capacity = 0.9
[vmm.slow]
vmm_downtime_s = 1
degraded_rate = 0.1
degraded_s = 300_000
[vmm.quick]
vmm_downtime_s = 50
[vmm.poor]
vmm_downtime_s = 5000
[os.kexec]
downtime_s = 20
[[hosts]]
name = "web"
count = 10
[[hosts.vms]]
name = "vm"
"""


def chosen_vmm_techniques(plan):
    """Returns the VMM technique of each VM, by the VM's name."""
    return {vms: choice.vmm for (_, vms), choice in plan.choices.items()}


@pytest.mark.parametrize("scope", ["vmm", "host"])
def test_keeping_the_capacity_takes_precedence_over_more_availability(scope):
    plan = make(fleet(CAPACITY, scope=scope))
    assert chosen_vmm_techniques(plan) == {"vm": "quick"} and not plan.problems  # slow: 2 of 10 hosts at the same time
    for less_capacity in ("capacity = 0.8", ""):
        plan = make(fleet(CAPACITY.replace("capacity = 0.9", less_capacity), scope=scope))
        assert chosen_vmm_techniques(plan) == {"vm": "slow"}


def test_a_technique_that_misses_availability_is_not_chosen_for_capacity():
    plan = make(fleet(CAPACITY.replace("[vmm.quick]\nvmm_downtime_s = 50\n", "")))
    assert chosen_vmm_techniques(plan) == {"vm": "slow"}  # poor would keep the capacity
    assert plan.problems[0] == (
        "hosts 'web': no techniques that are allowed and meet availability 0.9999 keep capacity 0.9: "
        "with the best (vm by slow) a host is unavailable or degraded for 3e+05 s, at most 2.416e+05 s are allowed"
    )
    assert "capacity 0.9 allows 1 of 10 hosts at a time, it needs 2" in plan.problems[1]


def test_if_availability_is_missed_in_any_case_the_capacity_is_kept():
    """No technique has 0.99999."""
    plan = make(fleet(CAPACITY.replace("availability = 0.9999", "availability = 0.99999")))
    assert chosen_vmm_techniques(plan) == {"vm": "quick"}
    (problem,) = plan.problems
    assert "web/vm: availability 0.99994" in problem


def test_vms_of_a_host_share_what_its_capacity_leaves():
    """A host may be away until the next one is (less a timer's tick), which is enough for two slow VMs."""
    slow_vm_s = 1 + 100_000
    assert 2 * slow_vm_s <= 28 * DAY_S / 10 - TICK_S < 3 * slow_vm_s
    text = CAPACITY.replace("degraded_s = 300_000", "degraded_s = 100_000")
    text += "count = 2\n" + '[[hosts.vms]]\nname = "other"\n[[hosts.vms]]\nname = "fixed"\nallow_vmm = ["slow"]\n'
    assert chosen_vmm_techniques(make(fleet(text, scope="host"))) == {"vm": "slow", "other": "slow", "fixed": "slow"}
    plan = make(fleet(text))  # two of the four VMs may be slow: the VM that allows only slow, and one more
    assert chosen_vmm_techniques(plan) == {"vm": "quick", "other": "slow", "fixed": "slow"} and not plan.problems


def test_the_choice_is_the_best_of_all_combinations_that_keep_the_capacity():
    """Compares with every combination of a technique for each of the four kinds of VMs: too many to do it in a plan."""
    document = tomllib.loads(CAPACITY)
    document["target"]["availability"] = 0.997
    document["vmm"]["middle"] = {"vmm_downtime_s": 20, "degraded_rate": 0.1, "degraded_s": 60_000}
    counts = (1, 2, 3, 5)  # of VMs of each kind
    document["hosts"][0]["vms"] = [{"name": f"vm{count}", "count": count} for count in counts]
    document["vmm"]["slow"]["degraded_s"] = 70_000
    plan = make(parse(document))
    assert not plan.problems
    os, limits = plan.fleet.os["kexec"], capacity_limits(plan.fleet, 28 * DAY_S, TICK_S)
    largest_sum = 0.0
    for techniques in itertools.product(plan.fleet.vmm.values(), repeat=len(counts)):
        away_s = sum(count * technique.away_s for count, technique in zip(counts, techniques, strict=True))
        availabilities = [availability(technique, os, Timers()) for technique in techniques]
        if limits.keeps(away_s):
            largest_sum = max(largest_sum, sum(map(operator.mul, counts, availabilities)))
    chosen_sum = sum(count * plan.choices["web", f"vm{count}"].availability for count in counts)
    assert chosen_sum == pytest.approx(largest_sum, 1e-15)
