"""Runs with guests: rejected settings, VM definitions, and the output of clients and guests. No guest is started.

- Settings are what a level of a factor sets for its runs, such as `{"reboot": "os", "how": "kexec"}`. Responses are the
  numbers that a run measures. The guest specification (`[guest]` of the definition) is the same for all levels.
- Phases are points of its boot at which a guest saves a snapshot, to resume from it in a later reboot.
- A disk is served by a disk server of Rekindle, or opened by QEMU itself.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from waiting import wait_until

from rekindle_lab.experiment import load, settings, subject
from rekindle_lab.experiment.definition import load as load_definition
from rekindle_lab.experiment.definition import parse
from rekindle_lab.experiment.guest import GuestRunner
from rekindle_lab.experiment.inside import END_OF_SAMPLE, GuestStatus
from rekindle_lab.experiment.inside import parse as parse_status
from rekindle_lab.experiment.runner import RunError
from rekindle_lab.guests import Image
from rekindle_lab.runs import processes
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


# The text of wrk, with an incomplete line at its end, and the JSON that our script wrk.lua prints as the last line.
WRK_TEXT = """Running 3s test @ http://10.88.1.2/
  50 requests in 3.00s, 1.20MB read
Non-2xx or 3xx responses: 2
{"requests": 50, "duration_us": 3000000, "bytes": 1200000,
"""
RESULT_LINE = (
    '{"requests": 50, "duration_us": 2000000, "bytes": 9, "failed": {"connect": 0, "read": 1, "write": 0, '
    '"status": 2, "timeout": 3}, "latency": {"mean_us": 30, "p50_us": 25000}}'
)


def test_wrks_output_is_parsed():
    """48 of 50 requests had a good status, in 2 s; 1 + 2 + 3 requests failed."""
    window = load.parse_wrk(WRK_TEXT + RESULT_LINE + "\n")
    assert (window.throughput_per_s, window.response_time_ms, window.failed) == (24.0, 25.0, 6)
    assert window.raw["wrk"]["bytes"] == 9


@pytest.mark.parametrize("output", ["", WRK_TEXT, "{}", RESULT_LINE.replace("2000000", "0")])
def test_other_output_of_wrk_is_rejected(output):
    with pytest.raises(RunError, match="wrk: its last line is not a result"):
        load.parse_wrk(output)


def test_wrk_runs_the_script(tmp_path):
    """Runs a real wrk against a real server; wrk requests each path."""
    (tmp_path / "one").write_text("1" * 1000)
    (tmp_path / "two").write_text("2")
    port_file = tmp_path / "port"
    server_code = (
        "import http.server, sys, pathlib, functools\n"
        f"h = functools.partial(http.server.SimpleHTTPRequestHandler, directory={str(tmp_path)!r})\n"
        "s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), h)\n"
        f"pathlib.Path({str(port_file)!r}).write_text(str(s.server_port))\n"
        "s.serve_forever()\n"
    )
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(["python3", "-c", server_code], stderr=file)
    try:
        wait_until(lambda: port_file.exists() and port_file.read_text(), within_s=30)
        url = f"http://127.0.0.1:{port_file.read_text()}/"
        command = ["wrk", "--threads", "1", "--connections", "2", "--duration", "1s", "--script", load.WRK_SCRIPT, url]
        completed = subprocess.run([*command, "--", "/one", "/two"], capture_output=True, text=True, check=True)
    finally:
        server.kill()
        server.wait()
    window = load.parse_wrk(completed.stdout)
    assert window.throughput_per_s > 0 and window.failed == 0
    # If wrk exits before its last answers, the server has logged more requests than wrk has counted.
    requested = re.findall(r'"(GET [^"]*)"', log.read_text())
    assert set(requested) == {"GET /one HTTP/1.1", "GET /two HTTP/1.1"}
    assert abs(requested.count("GET /one HTTP/1.1") - requested.count("GET /two HTTP/1.1")) <= 2


class GuestWithCaches:
    """A guest that counts the commands that it gets."""

    name = "made-up"

    def __init__(self, reply="ok"):
        self.reply, self.dropped = reply, 0

    def command(self, line):
        assert line == "drop-caches"
        self.dropped += 1
        return self.reply


def test_caches_are_dropped_under_load():
    guest = GuestWithCaches()
    with load.without_caches(guest, 0.01):
        wait_until(lambda: guest.dropped >= 3)
    dropped_under_load = guest.dropped
    with load.without_caches(guest, 0.0):  # never
        pass
    assert guest.dropped == dropped_under_load


def test_a_guest_that_does_not_drop_its_caches_is_reported():
    guest = GuestWithCaches("error no")
    with pytest.raises(RunError, match="made-up: drop-caches: error no"), load.without_caches(guest, 0.01):
        wait_until(lambda: guest.dropped)


# A sample as the guest prints it: parts of /proc/loadavg, /proc/stat, /proc/meminfo and /proc/vmstat.
STATUS = """0.10 0.20 0.30 1/90 400
cpu  100 0 50 800 50 0 0 0 0 0
MemFree:          1000 kB
Buffers:           200 kB
Cached:            300 kB
Slab:               70 kB
pgpgin 5000
pgpgout 60
"""


def test_a_guests_status_is_parsed():
    """Between the two samples, 50 of 100 ticks are busy (30 user, 20 system), and 100 KiB are paged in.

    Free memory includes buffers and caches: 1000 + 200 + 300 KiB.
    """
    first = parse_status(STATUS)
    assert first == {
        "load_15min": 0.3,
        "ticks": 1000,
        "idle_ticks": 850,
        "free_kib": 1500,
        "slab_kib": 70,
        "paged_kib": 5060,
    }
    last = parse_status(STATUS.replace("100 0 50 800 50", "130 0 70 850 50").replace("5000", "5100"))
    assert GuestStatus.responses([first, last]) == {
        "guest_cpu_pct": 50.0,
        "guest_load": 0.3,
        "guest_free_kib": 1500.0,
        "guest_io_blocks": 100.0,
    }


class Shell:
    """A guest whose shell is a command of this machine."""

    name = "made-up"

    def __init__(self, *words):
        self.words = words

    def ssh_command(self, command):
        assert command == "sh"
        return list(self.words)


def test_all_samples_come_over_one_session(tmp_path):
    """A fake shell logs its process; the three samples (one at the start) come from the same."""
    answer = tmp_path / "answer"
    answer.write_text(f"{STATUS}{END_OF_SAMPLE}\n")
    script = f"echo $$ >>{tmp_path}/pids; while read -r line; do cat {answer}; done"
    with GuestStatus(Shell("sh", "-c", script)) as status:
        assert status.take() == status.take()
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not Path("/proc", pid).exists()


def test_a_session_that_ends_is_reported():
    with pytest.raises(RuntimeError, match="made-up: ssh: ended: no route"):
        GuestStatus(Shell("sh", "-c", "read line; echo no route >&2")).__enter__()


def test_nothing_is_left_of_a_run_that_never_started(tmp_path):
    runner = GuestRunner(
        experiment(COLD, "downtime_s"),
        root=tmp_path,
        binary=tmp_path / "rekindle",
        qemu="qemu",
        disk=tmp_path,
        key="abc",
    )
    leaves = {"netns": "rkx-abc-none", "work": str(tmp_path / "work"), "disk": str(tmp_path / "disk")}
    runner.clear(leaves)
    (tmp_path / "work").mkdir()
    runner.clear(leaves)
    assert not (tmp_path / "work").exists()


def test_a_process_that_only_mentions_a_run_directory_is_not_ended(tmp_path):
    variable = f"REKINDLE_RUN_DIR={tmp_path / 'run'}"
    mentions = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", variable])
    try:
        wait_until(lambda: mentions.pid in processes.mentioning(variable))
        assert processes.with_variable(*variable.split("=")) == []
    finally:
        mentions.kill()
        mentions.wait()
