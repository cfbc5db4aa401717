"""The `rekindle` command as the lab calls it, here replaced by shell scripts: its JSON, failures and probes.

A probe is a client that `rekindle probe` runs until it is interrupted; it then prints a report. A gap is a time without
an answer to the probe.
"""

from pathlib import Path

import pytest
from invented_record import START_US, record

from rekindle_lab.rekindle import Rekindle, RekindleError, failed_requests, gap_around


def fake_rekindle(tmp_path, script):
    """Returns the command, with this shell script as its binary."""
    path = tmp_path / "rekindle"
    # The script uses sh, since bash may attribute a SIGINT during a command to that command.
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Rekindle(path, tmp_path / "run")


def test_the_json_is_the_last_line(tmp_path):
    rekindle = fake_rekindle(
        tmp_path, 'echo progress; echo "{\\"run\\": \\"$REKINDLE_RUN_DIR\\", \\"given\\": \\"$*\\"}"'
    )
    assert rekindle.reboot(["a", "b"], "warm") == {
        "run": str(tmp_path / "run"),
        "given": "replace-qemu a b --how warm --json",
    }


def test_a_failure_has_command_status_and_reason(tmp_path):
    rekindle = fake_rekindle(tmp_path, "echo 'no such VM' >&2; exit 1")
    with pytest.raises(RekindleError, match=r"replace-qemu a --how warm: exit status 1: no such VM"):
        rekindle.reboot(["a"], "warm")


def test_output_without_json_is_an_error(tmp_path):
    with pytest.raises(RekindleError, match="no JSON"):
        fake_rekindle(tmp_path, "echo done").show("a")


def test_an_interrupted_vm_is_recovered_before_it_is_stopped(tmp_path):
    log = tmp_path / "log"
    # `stop` fails with exit status 3, "interrupted", the first time.
    rekindle = fake_rekindle(
        tmp_path, f'echo "$1" >> {log}; echo "{{}}"; [ "$1" != stop ] || [ -e {log}.2 ] || {{ touch {log}.2; exit 3; }}'
    )
    rekindle.stop("a")
    assert log.read_text().split() == ["stop", "recover", "stop"]


# A probe that reports the URL and the namespace in its arguments once it is interrupted.
PROBE = """trap 'echo "{\\"url\\": \\"$2\\", \\"netns\\": \\"$6\\"}"; exit 0' INT
while :; do sleep 0.01; done"""


def test_probes_run_during_the_body_and_report_when_stopped(tmp_path):
    """Reports are empty while the probes run."""
    rekindle = fake_rekindle(tmp_path, PROBE)
    with rekindle.probes([("echo://a:7", "x"), ("echo://b:7", "y")], margin_s=0.2) as probes:
        assert [probe.report for probe in probes] == [{}, {}]
    assert [probe.report for probe in probes] == [
        {"url": "echo://a:7", "netns": "x"},
        {"url": "echo://b:7", "netns": "y"},
    ]


def test_probes_end_with_a_failing_body(tmp_path):
    rekindle = fake_rekindle(tmp_path, f"echo $$ >> {tmp_path}/pids; {PROBE}")
    with pytest.raises(KeyError), rekindle.probes([("echo://a:7", "x")], margin_s=0.2):
        raise KeyError
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not Path("/proc", pid).exists()


def test_the_gap_around_a_stop_is_measured_from_the_stop():
    # Stopped 3000 ms after the start of the probe, resumed at 3005 ms; the client saw a gap of 14 ms.
    probe = record("warm", stop_ms=3000, resume_ms=3005, gap_ms=14)["probe"]
    stop, resume = START_US + 3_000_000, START_US + 3_005_000
    assert gap_around(probe, stop, resume) == (stop, stop + 14_000, 14_000)
    probe["gaps"] = []
    assert gap_around(probe, stop, resume) == (0, 0, 14_000)


def test_all_failures_are_counted():
    assert failed_requests({"failed": {"timeouts": 1, "resets": 2, "refused": 3}}) == 6
