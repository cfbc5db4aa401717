"""The command `rekindle-lab experiment`, with an experiment whose runs are executed by a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from invented_experiment import lines
from typer.testing import CliRunner
from waiting import wait_until

from rekindle_lab.cli import app

TIMEOUT_STATUS = 124
"""Exit status recorded for a program that misses its deadline, as timeout(1) returns it."""
MEASURE_SCRIPT = """#!/bin/sh
echo "$REKINDLE_LAB_RUN" >> given
case $REKINDLE_LAB_RUN in *'"how": "cold"'*) base=100 ;; *) base=10 ;; esac
noise=$(wc -l < given)
echo progress
echo "{\\"responses\\": {\\"downtime_s\\": $base.$noise}, \\"versions\\": {\\"tool\\": \\"3\\"}}"
"""
# An experiment whose runs are executed by the script above. It prints 100.N or 10.N, where N is the number of the run.
DEFINITION = """
name = "by-command"
question = "Is kexec faster?"
seed = 11
replications = 3
runner = "command"
[[factor]]
name = "technique"
[factor.levels]
cold = { how = "cold" }
kexec = { how = "kexec" }
[[response]]
name = "downtime_s"
[command]
argv = ["./measure"]
deadline_s = 60
"""


@pytest.fixture
def by_command(tmp_path):
    """A folder with the definition x.toml and its program."""
    (tmp_path / "measure").write_text(MEASURE_SCRIPT)
    (tmp_path / "measure").chmod(0o755)
    (tmp_path / "x.toml").write_text(DEFINITION)
    return tmp_path


def test_the_command_line_from_file_to_report(by_command):
    """Stops after 2 of 6 runs, continues, writes the report; the analysis then has the program's versions."""
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--most", "2"])
    assert result.exit_code == 1
    assert "4 runs are not done" in result.output
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml")])
    assert result.exit_code == 0, result.output
    folder = by_command / "by-command"
    assert "by-command: 6 runs, 2 done, 0 failed, 4 to do" in result.output
    assert len((by_command / "given").read_text().splitlines()) == 6
    assert "Is kexec faster?" in (folder / "report" / "report.html").read_text()
    result = CliRunner().invoke(app, ["analyse", str(folder / "runs.jsonl"), "--json"])
    assert json.loads(result.output)["versions"] == {"tool": "3"}


def test_a_trial_is_shorter_and_separate_from_the_campaign(by_command):
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--trial", "1"])
    assert result.exit_code == 0, result.output
    assert len(lines(by_command / "by-command-trial")) == 2
    assert not (by_command / "by-command").exists()
    assert not (by_command / "by-command-trial" / "report").exists()  # one run per level cannot be analysed
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--trial", "2"])
    assert result.exit_code == 2
    assert "its replications differs from the definition's; give another --out" in result.output


def test_the_command_line_shows_the_order_and_runs_nothing(by_command):
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--show"])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["run"] for line in result.output.splitlines()] == list(range(1, 7))
    assert not (by_command / "given").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken >&2; exit 7", "exit status 7: broken"),
        ("echo '[1]'", "its last line is not a result"),
        ("echo '{}'", "its last line is not a result"),
        ("echo '{\"responses\": [1]}'", "responses: [1] is not of the kind dict"),
        ('echo \'{"responses": {"downtime_s": 1}, "versions": []}\'', "versions: [] is not of the kind dict"),
        (
            'echo \'{"responses": {"downtime_s": 1}, "versions": {"lib": {"numpy": "2.4"}}}\'',
            "versions.lib: {'numpy': '2.4'} is not a text",
        ),
        ("printf '\\377\\n'", "its last line is not a result"),
    ],
)
def test_a_failing_program_is_reported(by_command, script, message):
    (by_command / "measure").write_text(f"#!/bin/sh\n{script}\n")
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml")])
    assert result.exit_code == 1
    assert message in result.output


def test_processes_of_an_interrupted_run_end_before_the_next_run(by_command):
    """The program's child, in a session of its own, outlives the killed experiment; the next start ends it."""
    (by_command / "measure").write_text("#!/bin/sh\nsetsid sleep 1000 &\necho $! >> pids; wait\n")
    experiment = subprocess.Popen(
        [sys.executable, "-m", "rekindle_lab", "experiment", str(by_command / "x.toml")], stderr=subprocess.DEVNULL
    )
    pids = by_command / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    experiment.kill()
    experiment.wait()
    left_pid = pids.read_text().strip()
    assert Path("/proc", left_pid).exists()
    (by_command / "measure").write_text(MEASURE_SCRIPT)
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml")])
    assert result.exit_code == 0, result.output
    wait_until(lambda: not Path("/proc", left_pid).exists())


def test_runs_of_another_order_do_not_count_as_done(by_command):
    """order.json is deleted and drawn again from another seed, while runs.jsonl has runs of the first."""
    CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--most", "2"])
    (by_command / "by-command" / "order.json").unlink()
    (by_command / "x.toml").write_text(DEFINITION.replace("seed = 11", "seed = 12"))
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml")])
    assert result.exit_code == 2
    assert "row 1, column order" in result.output


def test_a_program_that_hangs_is_ended(by_command):
    (by_command / "measure").write_text("#!/bin/sh\necho $$ >> pids; exec sleep 1000\n")
    (by_command / "x.toml").write_text(DEFINITION.replace("deadline_s = 60", "deadline_s = 0.3"))
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml")])
    assert result.exit_code == 1
    assert "not done within 0.3 s" in result.output
    for pid in (by_command / "pids").read_text().split():
        assert not Path("/proc", pid).exists()
    assert {line["exit_status"] for line in lines(by_command / "by-command")} == {TIMEOUT_STATUS}
