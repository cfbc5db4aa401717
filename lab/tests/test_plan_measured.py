"""Plans whose downtimes come from the results of benchmarks and of an experiment instead of the plan's file."""

import json
from pathlib import Path

import pytest
from invented_runs import campaign, order_json, write
from typer.testing import CliRunner

from rekindle_lab.cli import app
from rekindle_lab.plan.command import make
from rekindle_lab.plan.fleet import load
from rekindle_lab.toml import DefinitionError

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
    """The campaign's downtimes are 117.5 s for cold, and a quarter of that for kexec (`invented_runs`)."""
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
