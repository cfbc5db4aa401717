"""Samples of processes and of the host, taken at an interval while a run is measured."""

import subprocess
import sys

import pytest
from waiting import wait_until

from rekindle_lab.experiment import sampling
from rekindle_lab.runs import processes


def test_the_samplers_responses_are_those_of_the_processes(tmp_path):
    """A process that is always busy uses one processor; 110 % allows for the clock ticks at both ends."""
    argument = str(tmp_path / "mark")
    busy_process = subprocess.Popen([sys.executable, "-c", "while True: pass", argument])
    try:
        wait_until(lambda: processes.mentioning(argument))
        with sampling.Sampler(0.05, lambda: processes.mentioning(argument)) as sampler:
            while len(sampler.samples) < 4 or sampler.samples[-1]["processes"][0]["cpu_s"] < 0.1:
                assert busy_process.poll() is None
    finally:
        busy_process.kill()
        busy_process.wait()
    responses = sampler.responses()
    assert [process["pid"] for process in sampler.samples[0]["processes"]] == [busy_process.pid]
    assert 0 < responses["host_cpu_pct"] <= 110
    assert responses["host_resident_kib"] > 1000


def test_a_failing_sample_is_reported():
    def fail_sample():
        raise RuntimeError("ssh: gone")

    with pytest.raises(RuntimeError, match="ssh: gone"), sampling.Sampler(0.01, list, fail_sample):
        pass
