"""Experiments: the order is committed first; after any failure no run is lost and none is done twice.

- A treatment is one level of each factor, and a level is a set of settings, such as `how = "cold"`. A response is a
  number that each run measures. A block has all treatments equally often.
- The order of the runs is drawn at random and committed: written to order.json before the first run.
- The ledger has two files: a line in begun.jsonl before each run, a line in runs.jsonl after it.
- The `leaves` of a run are the names of what it makes, which `clear` removes if a kill has left it.
"""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner
from waiting import wait_until

from rekindle_lab.analysis.runs import Order, read
from rekindle_lab.cli import app
from rekindle_lab.experiment import order, sampling, session
from rekindle_lab.experiment.definition import load, parse
from rekindle_lab.experiment.runner import Measured, RunError
from rekindle_lab.experiment.session import ExperimentSession, ExperimentStoppedError, duration
from rekindle_lab.runs import ledger, processes
from rekindle_lab.runs.ledger import Ledger, LedgerError
from rekindle_lab.toml import DefinitionError

TIMEOUT_STATUS = 124
"""Exit status recorded for a program that misses its deadline, as timeout(1) returns it."""
DOCUMENT = {
    "name": "made-up",
    "seed": 3,
    "replications": 4,
    "blocks": 2,
    "runner": "command",
    "factor": [{"name": "technique", "levels": {"cold": {"how": "cold"}, "kexec": {"how": "kexec"}}}],
    "response": [{"name": "downtime_s"}],
    "command": {"argv": ["true"]},
}


def made_up_experiment(**changes):
    """Returns the experiment of `DOCUMENT`, with some of its top-level keys replaced."""
    return parse(json.loads(json.dumps(DOCUMENT | changes)))


class FakeRunner:
    """A runner that logs its calls; `ends` maps the number of a call to what happens in that call."""

    def __init__(self, log, ends=None):
        self.log, self.ends = log, ends or {}

    def leaves(self, planned, attempt):
        return {"folder": f"left-{planned.run}-{attempt}"}

    def clear(self, leaves):
        self.write("cleared", leaves["folder"])

    def write(self, *words):
        with self.log.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def run(self, planned, settings, leaves):
        call = sum(line.startswith("run") for line in self.log.read_text().splitlines()) if self.log.exists() else 0
        self.write("run", planned.run, settings["how"])
        end = self.ends.get(call)
        if end is not None:
            end()
        value = planned.run + (100.0 if settings["how"] == "cold" else 10.0)
        return Measured({"downtime_s": value}, [{"t_s": 0.0, "raw": planned.run}], {"fake": "1"})


def run_session(folder, runner, experiment=None, **options):
    """Starts or continues the experiment; returns the number of runs that are not done, and the messages."""
    messages = []
    experiment_session = ExperimentSession(
        experiment or made_up_experiment(), folder, runner, {"rekindle": "0.1.0"}, messages.append
    )
    return experiment_session.run(**options), messages


def lines(folder):
    """Returns the lines of the finished runs, parsed."""
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def fail_run():
    """Fails the run in which it is called, with exit status 3."""
    raise RunError("no answer", 3)


def test_a_session_executes_the_committed_order_and_records_each_run(tmp_path):
    """Two levels with 4 replications: 8 runs, in the order of order.json, whose digest is in each line."""
    folder = tmp_path / "out"
    runs_left, messages = run_session(folder, FakeRunner(tmp_path / "log"))
    assert runs_left == 0
    recorded = lines(folder)
    assert [line["run"] for line in recorded] == list(range(1, 9))
    committed = json.loads((folder / "order.json").read_text())
    assert [line["treatment"] for line in recorded] == [run["treatment"] for run in committed["runs"]]
    first = recorded[0]
    assert first["order"] == committed["digest"]
    assert (first["outcome"], first["exit_status"], first["attempt"]) == ("done", 0, 1)
    assert first["samples"] == [{"t_s": 0.0, "raw": 1}]
    assert first["versions"] == {"rekindle": "0.1.0", "fake": "1"}
    assert messages[0] == "made-up: 8 runs, 0 done, 0 failed, 8 to do"
    assert "7 left, about" in messages[1] and messages[-1].endswith("the last")
    runs = read(folder / "runs.jsonl", order=Order.load(folder / "order.json"))
    assert len(runs.done) == 8


def test_the_order_is_on_disk_before_the_first_run(tmp_path):
    folder = tmp_path / "out"

    def check_order():
        assert json.loads((folder / "order.json").read_text())["runs"]

    run_session(folder, FakeRunner(tmp_path / "log", {0: check_order}))


def test_every_block_has_all_treatments_equally_often_and_the_seed_decides():
    """16 replications of two levels in 4 blocks: each block has each level 4 times."""
    experiment = made_up_experiment(replications=16, blocks=4)
    runs = order.draw(experiment)
    for block in range(1, 5):
        assert Counter(run.treatment["technique"] for run in runs if run.block == block) == {"cold": 4, "kexec": 4}
    assert [run.run for run in runs] == list(range(1, 33))
    assert {(run.treatment["technique"], run.replication) for run in runs} == {
        (level, number) for level in ("cold", "kexec") for number in range(1, 17)
    }
    assert order.draw(experiment) == runs
    assert order.draw(made_up_experiment(replications=16, blocks=4, seed=4)) != runs


def test_the_order_is_fully_random():
    """Over many seeds, the first run has each level equally often."""
    first_levels = Counter(
        order.draw(made_up_experiment(seed=seed, blocks=1))[0].treatment["technique"] for seed in range(400)
    )
    assert abs(first_levels["cold"] - 200) < 3 * 10  # three standard deviations: sqrt(400 / 4) = 10


def test_a_changed_order_or_that_of_another_experiment_is_rejected(tmp_path):
    run_session(tmp_path, FakeRunner(tmp_path / "log"), most=1)
    path = tmp_path / "order.json"
    with pytest.raises(order.OrderError, match="its seed differs from the definition's; give another --out"):
        run_session(tmp_path, FakeRunner(tmp_path / "log"), made_up_experiment(seed=4))
    document = json.loads(path.read_text())
    document["runs"][2]["treatment"], document["runs"][3]["treatment"] = {"technique": "x"}, {"technique": "y"}
    path.write_text(json.dumps(document))
    with pytest.raises(order.OrderError, match="the order was changed after it was committed"):
        run_session(tmp_path, FakeRunner(tmp_path / "log"))


def test_a_second_session_at_the_same_time_is_rejected(tmp_path):
    """The ledger has a lock, which the end of the first session releases."""
    with Ledger(tmp_path), pytest.raises(LedgerError, match="this experiment is running already"):
        Ledger(tmp_path)
    Ledger(tmp_path).__exit__(None, None, None)


def kill_this_process():
    """Ends the session without any clean-up, as the kernel would when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def killed_session(folder, log, ends, break_write=None):
    """Runs a session in a separate process, which may be killed; returns whether it was killed."""
    pid = os.fork()
    if pid == 0:
        try:
            if break_write is not None:
                ledger._append = break_write
            run_session(folder, FakeRunner(log, ends))
            os._exit(0)
        except BaseException:
            os._exit(9)
    _, status = os.waitpid(pid, 0)
    assert status == 0 or os.WIFSIGNALED(status), status
    return status != 0


def test_if_every_session_is_killed_no_run_is_lost_or_done_twice(tmp_path):
    """Of 8 runs, each but the first is killed once in its first attempt, and cleared by the next session."""
    folder, log = tmp_path / "out", tmp_path / "log"
    kills = 0

    def calls_before():
        return log.read_text().count("run") if log.exists() else 0

    # Each session does one run and is killed in its second.
    while killed_session(folder, log, {calls_before() + 1: kill_this_process}):
        kills += 1
        assert kills < 20
    assert kills == 7
    recorded = lines(folder)
    assert [line["run"] for line in recorded] == list(range(1, 9))
    assert all(line["outcome"] == "done" for line in recorded)
    assert [line["attempt"] for line in recorded] == [1] + [2] * 7
    logged = log.read_text().splitlines()
    assert [line for line in logged if line.startswith("cleared")] == [f"cleared left-{run}-1" for run in range(2, 9)]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("name", ["runs.jsonl", "begun.jsonl"])
def test_a_kill_while_a_line_is_written_loses_at_most_that_run(tmp_path, share, name):
    """Of the line of run 3, only a share is on disk: before the run (begun.jsonl) or after it (runs.jsonl)."""
    folder, log = tmp_path / "out", tmp_path / "log"
    real_append = ledger._append

    def torn_append(path, line):
        """Writes only this share of the line of run 3, then dies."""
        if path.name != name or line["run"] != 3:
            return real_append(path, line)
        data = (json.dumps(line) + "\n").encode()
        with path.open("ab") as file:
            file.write(data[: int(len(data) * share)])
        return kill_this_process()

    assert killed_session(folder, log, {}, torn_append)
    runs_left, messages = run_session(folder, FakeRunner(log))
    assert runs_left == 0
    assert any("was truncated" in text for text in messages) == (0 < share < 1)
    assert [line["run"] for line in lines(folder)] == list(range(1, 9))
    # The run is repeated unless the whole line of its end was on disk.
    attempts = sum(line.startswith("run 3 ") for line in log.read_text().splitlines())
    assert attempts == (2 if name == "runs.jsonl" and share < 1 else 1)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    """The line that could not be synced is removed, and its run is repeated."""
    folder = tmp_path / "out"
    real_fsync = os.fsync
    errors = []

    def fsync_that_fails_once(descriptor):
        """Fails for the third line of the finished runs."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name == "runs.jsonl" and path.stat().st_size and len(lines(folder)) == 3 and not errors:
            errors.append(OSError(errno.ENOSPC, "No space left on device"))
            raise errors[0]
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_that_fails_once)
    with pytest.raises(LedgerError, match="No space left on device; make room, then start the experiment again"):
        run_session(folder, FakeRunner(tmp_path / "log"))
    assert len(lines(folder)) == 2
    assert run_session(folder, FakeRunner(tmp_path / "log"))[0] == 0
    assert [line["run"] for line in lines(folder)] == list(range(1, 9))


def test_failed_runs_are_kept_counted_and_repeated_only_on_request(tmp_path):
    """The third call fails; the run is repeated only with `retry_failed`, as attempt 2."""
    folder, log = tmp_path / "out", tmp_path / "log"
    runs_left, messages = run_session(folder, FakeRunner(log, {2: fail_run}))
    assert runs_left == 1
    assert any("FAILED: no answer" in text for text in messages)
    failed = lines(folder)[2]
    assert (failed["outcome"], failed["exit_status"], failed["error"]) == ("failed", 3, "no answer")
    assert run_session(folder, FakeRunner(log))[0] == 1
    assert run_session(folder, FakeRunner(log), retry_failed=True)[0] == 0
    assert [(line["run"], line["attempt"]) for line in lines(folder)][-1] == (3, 2)
    runs = read(folder / "runs.jsonl", order=Order.load(folder / "order.json"))
    assert (len(runs.done), len(runs.failed)) == (8, 1)


def test_many_failures_in_a_row_end_the_session(tmp_path):
    with pytest.raises(ExperimentStoppedError, match="3 runs failed one after the other, the last with: no answer"):
        run_session(tmp_path / "out", FakeRunner(tmp_path / "log", dict.fromkeys(range(8), fail_run)))
    assert len(lines(tmp_path / "out")) == session.MAX_FAILURES_IN_A_ROW


@pytest.mark.parametrize("value", [float("nan"), None, "1"])
def test_a_run_without_its_response_has_failed(tmp_path, value):
    """Its samples are kept, with texts for the numbers that JSON does not have."""

    class WithoutResponse(FakeRunner):
        def run(self, planned, settings, leaves):
            return Measured({"downtime_s": value}, [{"kept": float("inf")}])

    with pytest.raises(ExperimentStoppedError):
        run_session(tmp_path / "out", WithoutResponse(tmp_path / "log"))
    line = lines(tmp_path / "out")[0]
    assert line["outcome"] == "failed" and "downtime_s" in line["error"]
    assert line["samples"] == [{"kept": "inf"}]


def test_replications_from_a_power_analysis_fill_blocks():
    """An increase of 0.15 needs 18 runs for a power of 0.90 (`test_analysis`), or 20 to fill 4 blocks."""
    assert made_up_experiment(replications={"sd_increase": 0.15}, blocks=1).replications == 18
    assert made_up_experiment(replications={"sd_increase": 0.15}, blocks=4).replications == 20
    assert made_up_experiment(replications={"sd_increase": 0.15, "power": 0.87}, blocks=1).replications == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replication": 3}, "unknown key 'replication'; did you mean replications?"),
        ({"name": "Made Up"}, "name: 'Made Up'; it must be of a-z"),
        ({"seed": None}, "dates, NaN|seed: is missing"),
        ({"replications": 1}, "replications: 1; it must be a whole number of at least 2"),
        ({"replications": {"power": 0.9}}, "replications.sd_increase: is missing"),
        ({"blocks": 3}, "blocks: 3; 4 replications cannot be split evenly into them"),
        ({"factor": []}, r"no \[\[factor\]\]"),
        ({"factor": [{"name": "a", "levels": {"x": {}}}]}, "factor 'a': needs at least two"),
        ({"factor": [{"name": "a", "levels": {"x": {}, "y": 3}}]}, "level 'y': must be a table"),
        (
            {"factor": [{"name": n, "levels": {"x": {"how": n}, "y": {}}} for n in ("a", "b")]},
            "factor 'b': 'how' is set by factor 'a' too; make them one factor",
        ),
        ({"response": [{"name": "Down Time"}]}, "names are like downtime_s"),
        ({"response": [{"name": "a_s"}, {"name": "a_s"}]}, "response: 'a_s' is defined twice"),
        ({"runner": "vm"}, "runner: 'vm'; there are: guest, command"),
        ({"command": {}}, "command.argv: is missing"),
        ({"command": {"argv": "true"}}, "command.argv: 'true'; it must be like"),
        ({"run_s": 0}, "run_s: 0; it must be seconds, more than 0"),
        ({"guest": {"disk_server": "yes"}}, "guest.disk_server: 'yes'; it must be like True"),
        ({"guest": {"measure_s": -1}}, "guest.measure_s: -1; it must be like 15.0"),
        ({"guest": {"measure_s": float("nan")}}, "dates, NaN and infinity have no meaning here"),
    ],
)
def test_an_error_in_a_definition_names_the_key(changes, message):
    with pytest.raises(DefinitionError, match=message):
        parse(DOCUMENT | changes)


def test_a_trial_is_shorter_and_separate_from_the_campaign(by_command):
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--trial", "1"])
    assert result.exit_code == 0, result.output
    assert len(lines(by_command / "by-command-trial")) == 2
    assert not (by_command / "by-command").exists()
    assert not (by_command / "by-command-trial" / "report").exists()  # one run per level cannot be analysed
    result = CliRunner().invoke(app, ["experiment", str(by_command / "x.toml"), "--trial", "2"])
    assert result.exit_code == 2
    assert "its replications differs from the definition's; give another --out" in result.output


def test_the_duration_is_estimated_before_the_first_run(tmp_path):
    """8 runs of the 120 s in the definition take 16 minutes."""
    _, messages = run_session(tmp_path / "out", FakeRunner(tmp_path / "log"), made_up_experiment(run_s=120), most=1)
    assert messages[0] == "made-up: 8 runs, 0 done, 0 failed, 8 to do, about 16 min"


def test_a_bad_definitions_file_is_named(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("name = ")
    with pytest.raises(DefinitionError, match=r"x\.toml: "):
        load(path)


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


@pytest.mark.parametrize(("seconds", "text"), [(1.23, "1.2 s"), (42, "42 s"), (600, "10 min"), (7800, "2 h 10 min")])
def test_a_duration_is_printed_in_units_that_fit_it(seconds, text):
    assert duration(seconds) == text


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
