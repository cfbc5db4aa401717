"""A real experiment with guests, from its file to the lines of its runs. Needs root.

It is killed in its first run and started again. The second start must end the remains of the killed run, whose names it
finds in begun.jsonl, repeat that run, and measure every response. `scripts/test lab` sets the binary.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

BINARY = os.environ.get("REKINDLE_TEST_BINARY")
EXPERIMENT = """
name = "real"
seed = 1
replications = 2
[[factor]]
name = "technique"
[factor.levels]
cold = { reboot = "os", how = "cold", protect_every = "1s" }
phase = { reboot = "os", how = "phase", options = ["--candidate", "services"] }
[[response]]
name = "throughput_per_s"
[[response]]
name = "host_cpu_pct"
[[response]]
name = "downtime_s"
[[response]]
name = "recovered_memory_pct"
[[response]]
name = "response_time_after_ms"
[guest]
image = "micro"
memory_mib = 192
load = "wrk"
connections = 2
drop_caches_every_s = 0.5
warm_up_s = 1.0
measure_s = 3.0
after_s = 1.0
leak_mib = 16
"""


LAB = Path(__file__).parents[1]
needs_binary = pytest.mark.skipif(
    BINARY is None, reason="REKINDLE_TEST_BINARY names no rekindle; scripts/test lab sets it"
)


def command(folder):
    """Returns the command for one run of each level, and its options of `Popen`: it uses this copy of the lab."""
    (folder / "real.toml").write_text(EXPERIMENT)
    words = [sys.executable, "-m", "rekindle_lab", "experiment", str(folder / "real.toml"), "--trial", "1"]
    return [*words, "--rekindle", BINARY], {"cwd": LAB, "env": {**os.environ, "PYTHONPATH": str(LAB)}}


def lines(folder, name):
    """Returns the lines of a file of the experiment's records, parsed."""
    return [json.loads(line) for line in (folder / "real-trial" / name).read_text().splitlines()]


def under_load(folder):
    """Returns whether wrk runs in the namespace of the run that was started first."""
    started = folder / "real-trial" / "begun.jsonl"
    if not started.exists() or not (started_runs := lines(folder, started.name)):
        return False
    command = ["ip", "netns", "pids", started_runs[0]["leaves"]["netns"]]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    # A process that has ended meanwhile has no name any more.
    names = [path.read_text() for pid in completed.stdout.split() if (path := Path("/proc", pid, "comm")).exists()]
    return "wrk\n" in names


def kill_under_load(folder):
    """Starts the experiment, and kills it as soon as wrk runs in its first run."""
    words, options = command(folder)
    session = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **options)
    try:
        deadline = time.monotonic() + 300
        while not under_load(folder):
            assert session.poll() is None, session.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        session.kill()
        session.communicate()


@needs_binary
def test_after_a_kill_it_continues_and_each_run_gives_its_responses_and_leaves_nothing(tmp_path):
    kill_under_load(tmp_path)
    words, options = command(tmp_path)
    completed = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False, **options)
    assert completed.returncode == 0, completed.stderr
    assert "run 1, attempt 1: interrupted; repeated" in completed.stderr
    finished = lines(tmp_path, "runs.jsonl")
    assert [(line["run"], line["attempt"]) for line in finished] == [(1, 2), (2, 1)]
    assert {line["treatment"]["technique"] for line in finished} == {"cold", "phase"}
    for line in finished:
        responses = line["responses"]
        assert all(responses[name] > 0 for name in responses), responses
        assert 90 < responses["recovered_memory_pct"] < 110  # a reboot recovers the whole leak of 16 MiB
        assert line["versions"]["leak"] == line["versions"]["image"]
    phase = next(line for line in finished if line["treatment"]["technique"] == "phase")
    (reboot,) = [sample["reboot"] for sample in phase["samples"] if "reboot" in sample]
    assert reboot["phase"]["candidate"] == "services"
    leaves_of_attempts = [line["leaves"] for line in lines(tmp_path, "begun.jsonl") if "leaves" in line]
    assert len(leaves_of_attempts) == 3
    for leaves in leaves_of_attempts:
        assert not Path(leaves["work"]).exists() and not Path(leaves["disk"]).exists()
        assert not Path("/run/netns", leaves["netns"]).exists()
