"""Runs with guests: rejected settings, our campaigns, VM definitions, and remains of a run. No guest is started.

- Settings are what a level of a factor sets for its runs, such as `{"reboot": "os", "how": "kexec"}`. Responses are the
  numbers that a run measures. The guest specification (`[guest]` of the definition) is the same for all levels.
- Phases are points of its boot at which a guest saves a snapshot, to resume from it in a later reboot.
- A disk is served by a disk server of Rekindle, or opened by QEMU itself.
"""

import tomllib
from pathlib import Path

import pytest

from rekindle_lab.experiment import settings, subject
from rekindle_lab.experiment.definition import load as load_definition
from rekindle_lab.experiment.definition import parse
from rekindle_lab.experiment.guest import GuestRunner
from rekindle_lab.guests import Image
from rekindle_lab.toml import DefinitionError

CAMPAIGNS = sorted((Path(__file__).parents[1] / "campaigns").glob("*.toml"))
MAX_CAMPAIGN_S = 90 * 60
"""Longest campaign in seconds, by its own estimate."""
COLD = {"reboot": "os", "how": "cold"}


def experiment(level, response, **guest):
    """Returns an experiment that compares a cold reboot with `level`, by one response; `guest`: its `[guest]`."""
    return parse(
        {
            "name": "made-up",
            "seed": 3,
            "replications": 2,
            "factor": [{"name": "f", "levels": {"a": COLD, "b": level}}],
            "response": [{"name": response}],
            "guest": guest,
        }
    )


@pytest.mark.parametrize(
    ("level", "response", "guest", "message"),
    [
        ({"reboot": "os", "haw": "cold"}, "downtime_s", {}, "level 'b': unknown setting 'haw'"),
        ({"reboot": 1}, "downtime_s", {}, "level 'b': reboot: 1 is not of the kind str"),
        ({"reboot": "host"}, "downtime_s", {}, "reboot: 'host'; there are: os, vmm"),
        (
            {"reboot": "os", "how": "kexek"},
            "downtime_s",
            {},
            "how of the reboot of os: 'kexek'; there are: cold, kexec",
        ),
        ({"reboot": "vmm", "how": "kexec"}, "downtime_s", {}, "how of the reboot of vmm: 'kexec'; there are: warm, "),
        ({"how": "kexec"}, "throughput_per_s", {}, "how: 'kexec' without a reboot; set reboot, or leave how out"),
        ({"options": ["--end", "freeze"]}, "throughput_per_s", {}, "options without a reboot; set reboot, or leave"),
        ({"how": "phase", "disk_server": False}, "throughput_per_s", {}, "phase needs disks with servers"),
        ({}, "downtime_s", {}, "'downtime_s', but treatment {'f': 'b'} reboots nothing"),
        ({}, "throughput_after_per_s", {}, "'throughput_after_per_s', but treatment {'f': 'b'} reboots nothing"),
        (COLD, "downtime_ms", {}, "unknown 'downtime_ms'; a guest has: throughput_per_s"),
        (COLD, "guest_load", {}, "'guest_load' needs a debian image"),
        (COLD, "recovered_memory_pct", {}, "'recovered_memory_pct', but nothing is leaked; set guest.leak_mib"),
        (
            {"reboot": "os", "how": "kexec"},
            "downtime_s",
            {},
            "kexec needs an agent in the guest, which micro does not have",
        ),
        (
            {"reboot": "os", "how": "phase", "disk_server": False},
            "downtime_s",
            {},
            "phase needs disks with servers; set disk_server = true",
        ),
        ({"reboot": "os", "how": "warm-cache"}, "downtime_s", {"disk_server": False}, "warm-cache needs disks"),
        (COLD, "downtime_s", {"image": "mikro"}, "guest.image: 'mikro'; there are: micro, debian, immutable"),
        (COLD, "downtime_s", {"load": "ab"}, "guest.load: 'ab'; there are: probe, wrk"),
        (COLD, "downtime_s", {"load": "wrk", "files": 2}, "guest.files: 2; micro has 1"),
        (COLD, "downtime_s", {"image": "debian", "files": 2}, "guest.files: 2; only wrk requests several"),
    ],
)
def test_unsupported_settings_are_named_before_anything_runs(level, response, guest, message):
    """`level` is compared with a cold reboot, `response` is measured, and `guest` is the guest specification."""
    with pytest.raises(DefinitionError, match=message.replace("{", r"\{")):
        settings.check(experiment(level, response, **guest))


def test_phases_may_be_kept_without_a_reboot():
    settings.check(experiment({"how": "phase"}, "throughput_per_s"))


def test_each_way_of_a_reboot_is_known():
    for reboot, ways in settings.WAYS.items():
        for how in ways:
            settings.check(experiment({"reboot": reboot, "how": how}, "downtime_s", image="immutable"))
    settings.check(experiment({"reboot": "vmm"}, "downtime_s"))


@pytest.mark.parametrize("path", CAMPAIGNS, ids=lambda path: path.stem)
def test_our_campaigns_are_valid_and_take_at_most_90_minutes(path):
    """Each level has 16 runs, as in the paper."""
    campaign = load_definition(path)
    settings.check(campaign)
    assert campaign.name == path.stem
    assert campaign.replications == 16
    assert campaign.run_s is not None
    assert len(campaign.treatments()) * campaign.replications * campaign.run_s <= MAX_CAMPAIGN_S


def test_the_campaigns_of_our_results_are_present():
    assert {path.stem for path in CAMPAIGNS} >= {"overhead", "coverage", "penalty-disk", "penalty-protect"}


def guest_and_definition(tmp_path, guest_spec, level_settings, kind):
    """Returns the guest of a run, and its VM definition as read from TOML."""
    image = Image(kind, tmp_path / "image")
    guest = subject.subject(
        guest_spec, level_settings, image, netns="space", ram=tmp_path / "ram", disk=tmp_path / "disk"
    )
    return guest, tomllib.loads(guest.definition("/usr/bin/qemu"))


@pytest.mark.parametrize(("kind", "disks"), [("micro", 1), ("debian", 1), ("immutable", 2)])
def test_the_disks_are_a_servers_or_qemus_own(tmp_path, kind, disks):
    """immutable has two disks: the shared one, which it only reads, and its own."""
    guest_spec = experiment(COLD, "downtime_s", image=kind, disk_cache="none", definition="vcpus = 2").guest
    for served in (True, False):
        _, definition = guest_and_definition(tmp_path, guest_spec, {"disk_server": served}, kind)
        assert [disk["server"] for disk in definition["disk"]] == [served] * disks
        assert {disk["cache"] for disk in definition["disk"]} == {"none"}
        assert definition["vcpus"] == 2
    _, definition = guest_and_definition(tmp_path, experiment(COLD, "downtime_s", image=kind).guest, {}, kind)
    assert [disk["server"] for disk in definition["disk"]] == [True] * disks
    assert "cache" not in definition["disk"][0]


def test_only_guests_that_resume_from_phases_keep_them(tmp_path):
    """Other guests would boot longer for nothing."""
    guest_spec = experiment(COLD, "downtime_s", image="immutable").guest
    guest, definition = guest_and_definition(tmp_path, guest_spec, {"how": "phase"}, "immutable")
    assert guest.phases and definition["phase"]["save"] == ["kernel", "services"]
    guest, definition = guest_and_definition(tmp_path, guest_spec, {"how": "kexec", "touch": "100M"}, "immutable")
    assert not guest.phases and "phase" not in definition
    assert definition["boot"]["append"].endswith("rekindle.touch=100M")


def test_nothing_is_left_of_a_run_that_never_started(tmp_path):
    runner = GuestRunner(
        experiment(COLD, "downtime_s"),
        root=tmp_path,
        binary=tmp_path / "rekindle",
        qemu="qemu",
        disk=tmp_path,
        key="abc",
    )
    leftovers = {"netns": "rkx-abc-none", "work": str(tmp_path / "work"), "disk": str(tmp_path / "disk")}
    runner.clear(leftovers)
    (tmp_path / "work").mkdir()
    runner.clear(leftovers)
    assert not (tmp_path / "work").exists()
