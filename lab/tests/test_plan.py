"""Plans of a fleet: the best technique for each VM, an order of hosts that keeps the capacity, and reported problems.

- A technique renews (reboots) a VM's VMM or OS; a coupled one reboots the OS with the VMM.
- Capacity is the share of the hosts that must be available at any time; the hosts of a group must not be away at the
  same time. A host is away while one of its VMs is unavailable or degraded by a renewal.
- Scope "vmm": the VMs of a host are renewed one after the other. Scope "host": all together, by the host's reboot.
"""

import itertools
import json
import math
import operator
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest
from made_plan import TEXT, fleet, vms_table
from made_runs import campaign, order_json, write
from typer.testing import CliRunner

from rekindle_lab.cli import app
from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import DAY_S, ROOTHAMMER_JBOSS, Timers
from rekindle_lab.plan.command import make
from rekindle_lab.plan.fleet import load, parse
from rekindle_lab.plan.rolling import capacity_limits
from rekindle_lab.plan.timers import TICK_S
from rekindle_lab.toml import DefinitionError


def test_each_vm_gets_the_best_that_it_allows():
    """front has the paper's figures and so its availability; gpu allows no technique that meets the target."""
    plan = make(fleet())
    front, gpu = plan.choices["web", "front"], plan.choices["web", "gpu"]
    postgres = plan.choices["db", "postgres"]
    assert (front.vmm, front.os, front.coupled, front.nines, front.meets) == ("warm", "cold", False, 4, True)
    assert front.availability == availability(
        ROOTHAMMER_JBOSS.technique("warm"), ROOTHAMMER_JBOSS.os, ROOTHAMMER_JBOSS.timers
    )
    assert (gpu.vmm, gpu.coupled, gpu.nines, gpu.meets) == ("cold", True, 3, False)
    assert postgres.os == "kexec"
    assert plan.problems == [
        "web/gpu: availability 0.999857, the target is 0.9999; "
        "with cold and cold it needs longer intervals or shorter downtimes"
    ]


def test_the_shortest_intervals_are_where_the_target_is_missed():
    """A thousandth longer, the target of 0.9999 is met; a thousandth shorter, it is missed."""
    choice = make(fleet()).choices["web", "front"]
    warm, os = ROOTHAMMER_JBOSS.technique("warm"), ROOTHAMMER_JBOSS.os
    for shortest_s, timers in (
        (choice.vmm_interval_min_s, lambda vmm_s: Timers(vmm_s, choice.os_interval_s)),
        (choice.os_interval_min_s, lambda os_s: Timers(choice.vmm_interval_s, os_s)),
    ):
        slightly_longer = availability(warm, os, timers(shortest_s * 1.001))
        slightly_shorter = availability(warm, os, timers(shortest_s * 0.999))
        assert slightly_longer >= 0.9999 > slightly_shorter


def test_the_order_has_every_host_once_and_keeps_groups_apart():
    """10 hosts in 28 days, 6 of one group and 4 of another: of three in a row, each group has one."""
    rolling = make(fleet()).rolling
    assert sorted(rolling.hosts) == sorted([f"web-{n}" for n in range(1, 7)] + [f"db-{n}" for n in range(1, 5)])
    kinds = [name.split("-")[0] for name in rolling.hosts]
    for first in range(8):  # of each three hosts in a row
        assert {"web", "db"} <= set(kinds[first : first + 3])
    assert rolling.spacing_s == 28 * DAY_S / 10
    assert (rolling.concurrent, rolling.most_concurrent, rolling.conflicts) == (1, 1, ())
    assert rolling.capacity == pytest.approx(0.9)


class Absence(NamedTuple):
    """A time, in seconds, in which a VM of a host is away."""

    host: str
    start_s: float
    end_s: float


def most_hosts_away(plan):
    """Returns how many hosts are away at the same time at most: a second computation, by counting.

    It lists when each VM of each host is away, in two intervals, since the end of one overlaps the start of the next.
    """
    fleet, rolling = plan.fleet, plan.rolling
    absences = []
    for place, host in enumerate(rolling.hosts):
        hosts = next(hosts_of_kind for hosts_of_kind in fleet.hosts if host in hosts_of_kind.names)
        offset_s = 0
        for vms in hosts.vms:
            away_s = fleet.vmm[plan.choices[hosts.name, vms.name].vmm].away_s
            for _ in range(vms.count):
                for interval_number in range(2):
                    start_s = place * rolling.spacing_s + interval_number * fleet.vmm_interval_max_s + offset_s
                    # It starts immediately, or as late as possible.
                    absences.append(Absence(host, start_s, start_s + away_s + TICK_S))
                offset_s += away_s if fleet.scope == "vmm" else 0

    def hosts_away_at(moment_s):
        return {absence.host for absence in absences if absence.start_s <= moment_s < absence.end_s}

    # The number can only grow when a VM starts to be away, so these moments are enough.
    return max(len(hosts_away_at(absence.start_s)) for absence in absences)


@pytest.mark.parametrize("scope", ["vmm", "host"])
# From none to far longer than the time between two hosts (28 days / 10 = 241,920 s).
@pytest.mark.parametrize("degraded_s", [0, 80_000, 80_500, 100_000, 130_000, 241_000, 330_000, 1_000_000])
def test_as_many_hosts_overlap_as_stated(degraded_s, scope):
    """`rolling.concurrent` is computed by a formula from the longest time that a host is away."""
    document = tomllib.loads(TEXT) | {"scope": scope}
    document["vmm"] = {"warm": {"vmm_downtime_s": 43, "degraded_rate": 0.1, "degraded_s": degraded_s}}
    vms_table(document, "web", "gpu")["allow_vmm"] = ["warm"]
    vms_table(document, "db", "postgres")["count"] = 3
    plan = make(parse(document))
    assert most_hosts_away(plan) == plan.rolling.concurrent


@pytest.mark.parametrize(("scope", "away_s"), [("vmm", 2 * 43 + 243), ("host", 243)])
def test_vms_of_a_host_are_disturbed_one_after_the_other_or_all_by_its_reboot(scope, away_s):
    """A host "web" has two warm VMs (43 s each) and a cold one (243 s)."""
    assert make(fleet(scope=scope)).rolling.away_s == away_s


def test_a_group_is_kept_apart_for_all_vms_of_a_host():
    """9 VMs of a host take 9 times as long, so that its group overlaps; one VM does not."""
    document = tomllib.loads(TEXT)
    document["vmm"]["warm"] |= {"degraded_s": 60_000}
    assert not make(parse(document)).rolling.conflicts
    vms_table(document, "db", "postgres")["count"] = 9
    text = "\n".join(make(parse(document)).rolling.conflicts)
    assert "it needs 3" in text and "group 'db': two of its 4 hosts overlap" in text


def test_unmet_capacity_and_groups_are_reported_with_a_sufficient_interval():
    """Each host is away for longer than two spacings of hosts, so 3 overlap, unless the interval is long enough."""
    document = tomllib.loads(TEXT)
    vms_table(document, "web", "gpu")["allow_vmm"] = ["cold"]
    document["vmm"]["cold"] |= {"degraded_rate": 0.7, "degraded_s": 500_000}
    away_s = 2 * 43 + 243 + 500_000  # of a host "web": two warm VMs and the cold one
    spacing_s = 28 * DAY_S / 10  # of 10 hosts
    assert 2 * spacing_s < away_s < 3 * spacing_s
    plan = make(parse(document))
    assert plan.rolling.concurrent == 3
    text = "\n".join(plan.rolling.conflicts)
    sufficient_d = f"{10 * away_s / DAY_S:.1f}"
    assert (
        f"capacity 0.9 allows 1 of 10 hosts at a time, it needs 3: an interval of {sufficient_d} days would do" in text
    )
    assert "group 'web': two of its 6 hosts overlap" in text
    document["vmm_interval_max_d"] = math.ceil(10 * away_s / DAY_S)
    assert not any("capacity" in problem for problem in make(parse(document)).rolling.conflicts)


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


def test_a_plan_of_ten_thousand_hosts_takes_less_than_a_second():
    document = tomllib.loads(TEXT)
    document["hosts"][0] |= {"count": 6000}
    document["hosts"][1] |= {"count": 4000}
    document["target"]["capacity"] = 0.9
    document["vmm"]["slow"] = {"vmm_downtime_s": 1, "degraded_rate": 0.1, "degraded_s": 300_000}  # the best, too long
    large_fleet = parse(document)
    started_s = time.process_time()
    plan = make(large_fleet)
    assert time.process_time() - started_s < 1  # processor time, so that other work does not count
    assert len(plan.rolling.hosts) == 10_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vmm_interval_max_d = 28", "", "vmm_interval_max_d: is missing (the longest"),
        ("os_interval_max_d = 7", "os_interval_max_d = 0", "os_interval_max_d: 0; it must be more than 0"),
        ("availability = 0.9999", "availability = 99.99", "target.availability: 99.99; it must be between 0 and 1"),
        ("downtime_s = 34", "downtime = 34", "os.cold: unknown key 'downtime'; did you mean downtime_s?"),
        ("vmm_downtime_s = 43\n", "", "vmm.warm.vmm_downtime_s: is missing"),
        ('["saved", "cold"]', '["savd"]', "hosts 'web', vms: allow_vmm: 'savd' was not measured; there are: warm"),
        ('allow_vmm = ["saved", "cold"]', "allow_vmm = []", "allow_vmm: is empty"),
        ('name = "db"', 'name = "web"', "hosts: 'web-1' is defined twice"),
        ("[[hosts]]", "[[host]]", "unknown key 'host'; did you mean hosts?"),
    ],
)
def test_an_error_names_the_key_that_is_wrong(old, new, message):
    text = TEXT.replace(old, new)
    with pytest.raises((DefinitionError, ValueError)) as caught:
        fleet(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[target]\navailability = 0.9999\ncapacity = 0.9", "target = 0.9999", "target: must be a table: [target]"),
        ("[target]", "measured = 1\n[target]", "measured: must be a table: [measured]"),
        ('group = "web"', 'group = ["web"]', 'group: ["web"] is not a text'),
        ('group = "web"', "group = 2027-01-04", 'group: "datetime.date(2027, 1, 4)" is not a text'),
        ('allow_vmm = ["saved", "cold"]', "allow_vmm = 1", 'allow_vmm: 1; it must be a list of names, as ["warm"]'),
        ('allow_vmm = ["saved", "cold"]', 'allow_vmm = "cold"', "allow_vmm: 'cold'; it must be a list of names"),
        (
            'allow_os = ["cold"]',
            'allow_os = [["cold"]]',
            "allow_os: [['cold']]; it must be a list of names, as [\"cold\"]",
        ),
        ("coupled = true", 'coupled = "false"', "vmm.cold.coupled: 'false'; it must be true or false"),
        ("coupled = true", "spare_hosts = 0.5", "vmm.cold.spare_hosts: 0.5; it must be a whole number"),
        ("vmm_downtime_s = 434", "vmm_downtime_s = -1", "vmm.saved.vmm_downtime_s: -1; it must be 0 or more"),
        ("vmm_downtime_s = 434", "", "vmm.saved.vmm_downtime_s: is missing"),
        ("downtime_s = 34\n", 'downtime_s = "34"\n', "os.cold.downtime_s: '34' is not a finite number"),
        ('name = "db"', 'name = "db%i"', "hosts: name: 'db%i'; it must be of a-z, A-Z, 0-9, `.`, `_` and `-`"),
        ('name = "front"', 'name = "front end"', "name: 'front end': ` ` is not allowed in a name; use only a-z, 0-9"),
        ('name = "front"', 'name = "front%n"', "name: 'front%n': `%` is not allowed in a name"),
        ('name = "front"', 'name = "a/b"', "name: 'a/b': `/` is not allowed in a name"),
        ('name = "front"', 'name = "Front"', "name: 'Front': `F` is not allowed in a name"),
        ('name = "gpu"', 'name = ""', "name: '': empty; write 1 to 63 characters"),
        ('name = "front"', 'name = ""', "name: '': empty; write 1 to 63 characters"),
        ('name = "gpu"', 'name = "-rf"', "name: '-rf': starts with `-`; start it with a-z or 0-9"),
        ('name = "front"', f'name = "{"a" * 62}"', f"{'a' * 62}-2 is 64 characters long; shorten it to at most 63"),
    ],
)
def test_invalid_content_is_reported_with_file_key_and_remedy(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT.replace(old, new, 1))
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 2, result.output
    assert str(path) in result.output and message in result.output


@pytest.mark.parametrize("name", ["web", "0", "a.b_c-d", "10.77.0.1", "a" * 63])
def test_a_name_that_a_vm_can_have_is_accepted(name):
    assert fleet(TEXT.replace('"gpu"', f'"{name}"')).hosts[0].vms[1].name == name


def test_the_command_line_prints_a_plan_and_writes_timers(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT.replace('allow_vmm = ["saved", "cold"]', ""))
    out = tmp_path / "units"
    arguments = ["plan", str(path), "--start", "2027-01-04T02:00:00", "--timers", str(out), "--host", "db-1"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["reached"] and len(document["order"]) == 10
    assert document["start_unix_s"] == datetime(2027, 1, 4, 2, tzinfo=UTC).timestamp()
    assert (out / "rekindle-plan-os-postgres.timer").exists()
    text = CliRunner().invoke(app, arguments).output
    assert "2027-01-04 02:00:00 UTC" in text and "independent" in text
    result = CliRunner().invoke(app, ["plan", str(path), "--timers", str(out)])
    assert result.exit_code == 2 and "--timers needs --host" in result.output


def test_the_command_line_reports_a_missed_target(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT)
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 1
    assert "NOT REACHED: web/gpu" in result.output


# Downtimes come from the results of benchmarks and of an experiment instead of the file itself.
MEASURED = """
vmm_interval_max_d = 28
os_interval_max_d = 7
[measured]
vmm = "vmm.json"
vmm_guests = "11 x micro 256M"
os = "runs.jsonl"
[[hosts]]
name = "one"
[[hosts.vms]]
name = "vm"
"""


def write_measured_plan(tmp_path, text=MEASURED, levels=("cold", "kexec")):
    """Writes a plan's file, with the measurements in the same folder."""
    gaps_ms = {"warm": 843.0, "cpr-transfer": 814.0, "cold": 31_007.0}
    rows = [{"guests": "11 x micro 256M", "how": how, "gap ms": gap_ms} for how, gap_ms in gaps_ms.items()]
    (tmp_path / "vmm.json").write_text(json.dumps({"tables": {"Guest-stopped time and service gap": rows}}))
    downtimes_s = {"cold": 12.0, "phase-kernel": 6.0, "phase-services": 1.5}
    rows = [{"guest": "immutable", "reboot": how, "downtime": seconds} for how, seconds in downtimes_s.items()]
    (tmp_path / "os.json").write_text(json.dumps({"tables": {"Downtime as a client sees it (s, medians)": rows}}))
    lines = campaign(levels=levels)
    write(tmp_path / "runs.jsonl", lines)
    order_json(tmp_path / "order.json", lines, levels=levels)
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_downtimes_are_read_from_measured_files(tmp_path):
    """The campaign's downtimes are 117.5 s for cold, and a quarter of that for kexec (`made_runs`)."""
    plan = make(load(write_measured_plan(tmp_path)))
    fleet = plan.fleet
    assert list(fleet.vmm) == ["warm", "cold"]  # a peer is not part of a plan
    assert (fleet.vmm["warm"].vmm_downtime_s, fleet.vmm["cold"].coupled) == (0.843, True)
    assert fleet.os["cold"].downtime_s == pytest.approx(117.5, abs=3)
    assert fleet.os["kexec"].downtime_s == pytest.approx(117.5 / 4, abs=1)
    (choice,) = plan.choices.values()
    assert (choice.vmm, choice.os) == ("warm", "kexec")


def test_sources_of_downtimes_are_reported(tmp_path):
    result = CliRunner().invoke(app, ["plan", str(write_measured_plan(tmp_path))])
    assert result.exit_code == 0, result.output
    assert "VMM: median service gaps of 11 x micro 256M (vmm.json); degradation is taken as 0" in result.output
    assert "OS: mean downtimes of 16 or more runs per level (runs.jsonl)" in result.output


def test_the_latest_phase_of_the_topic_os_counts(tmp_path):
    text = MEASURED.replace('os = "runs.jsonl"', 'os = "os.json"\nos_guests = "immutable"')
    fleet = load(write_measured_plan(tmp_path, text))
    assert {name: reboot.downtime_s for name, reboot in fleet.os.items()} == {"cold": 12.0, "phase": 1.5}


def test_a_table_in_the_plan_overrides_a_measured_file(tmp_path):
    fleet = load(
        write_measured_plan(tmp_path, MEASURED.replace("[[hosts]]", "[os.kexec]\ndowntime_s = 9\n[[hosts]]", 1))
    )
    assert fleet.os["kexec"].downtime_s == 9
    assert fleet.os["cold"].downtime_s > 100


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ('vmm = "vmm.json"', 'vmm = "gone.json"', r"gone\.json: not the JSON of `make bench TOPIC=vmm`"),
        ('vmm_guests = "11', 'vmm_guests = "12', "no guests '12 x micro 256M'; there are: 11 x micro 256M"),
        ('vmm_guests = "11 x micro 256M"', "", "vmm_guests: is missing"),
        ('os = "runs.jsonl"', 'os = "gone.jsonl"', "(?s)measured.os: .*cannot be read"),
        ('os = "runs.jsonl"', 'os = "vmm.json"\nos_guests = "a"', "not the JSON of `make bench TOPIC=os`"),
        ('os = "runs.jsonl"', 'os = "os.json"\nos_guests = "micro"', "no 'micro' in .*; there are: immutable"),
        ('os = "runs.jsonl"', "", r"no \[os.NAME\]; at least one technique .*, or measured.os"),
        ("[measured]", "[measured]\nhost = 1", "measured: unknown key 'host'"),
        ("[measured]", "measured = 3\n[more]", "measured: must be a table|unknown key 'more'"),
    ],
)
def test_invalid_measured_files_are_named(tmp_path, was, now, message):
    path = write_measured_plan(tmp_path, MEASURED.replace(was, now))
    with pytest.raises(DefinitionError, match=message):
        load(path)


def test_a_level_that_is_no_way_to_reboot_is_named(tmp_path):
    with pytest.raises(DefinitionError, match="level 'qemu' is no way to reboot an OS; there are: cold, kexec"):
        load(write_measured_plan(tmp_path, levels=("cold", "qemu")))


def test_the_cold_gap_of_a_vmm_can_be_that_of_an_os(tmp_path):
    text = MEASURED.replace('os = "runs.jsonl"', 'os_guests = "11 x micro 256M"')
    fleet = load(write_measured_plan(tmp_path, text))
    assert {name: reboot.downtime_s for name, reboot in fleet.os.items()} == {"cold": 31.007}


def test_our_own_plan_comes_from_our_own_results():
    plan = make(load(Path(__file__).parents[1] / "plans" / "eleven-vms.toml"))
    (choice,) = plan.choices.values()
    assert (choice.vmm, choice.os, choice.coupled) == ("warm", "cold", False)
    assert not plan.problems
