"""A real experiment with guests, from its file to the lines of its runs. Needs root.

`scripts/test lab` names the binary.
"""

import json
import os
import subprocess
import sys
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


@pytest.mark.skipif(BINARY is None, reason="REKINDLE_TEST_BINARY names no rekindle; scripts/test lab sets it")
def test_each_kind_of_run_gives_its_responses_and_leaves_nothing(tmp_path):
    (tmp_path / "real.toml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "rekindle_lab", "experiment", tmp_path / "real.toml", "--trial", "1"]
    # In the folder of the project, whatever of it is installed.
    lab = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(lab)}
    done = subprocess.run(
        [*command, "--rekindle", BINARY],
        cwd=lab,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "real-trial" / "runs.jsonl").read_text().splitlines()]
    assert {line["treatment"]["technique"] for line in lines} == {"cold", "phase"}
    for line in lines:
        responses = line["responses"]
        assert all(responses[name] > 0 for name in responses if name != "recovered_memory_pct"), responses
        assert 90 < responses["recovered_memory_pct"] < 110
        assert line["versions"]["leak"] == line["versions"]["image"]
    phase = next(line for line in lines if line["treatment"]["technique"] == "phase")
    (reboot,) = [sample["reboot"] for sample in phase["samples"] if "reboot" in sample]
    assert reboot["phase"]["candidate"] == "services"
    for left in (
        json.loads(line)["leaves"] for line in (tmp_path / "real-trial" / "begun.jsonl").read_text().splitlines()
    ):
        assert not Path(left["work"]).exists() and not Path(left["disk"]).exists()
        assert not Path("/run/netns", left["netns"]).exists()
