"""Sessions of an experiment: after any failure no run is lost and none is done twice.

The ledger has two files: a line in begun.jsonl before each run, a line in runs.jsonl after it.
"""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from invented_experiment import FakeRunner, fail_run, invented_experiment, lines, run_session

from rekindle_lab.analysis.runs import Order, read
from rekindle_lab.experiment import session
from rekindle_lab.experiment.runner import Measured
from rekindle_lab.experiment.session import ExperimentStoppedError, duration
from rekindle_lab.runs import ledger
from rekindle_lab.runs.ledger import Ledger, LedgerError


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
        def run(self, planned, settings, leftovers):
            return Measured({"downtime_s": value}, [{"kept": float("inf")}])

    with pytest.raises(ExperimentStoppedError):
        run_session(tmp_path / "out", WithoutResponse(tmp_path / "log"))
    line = lines(tmp_path / "out")[0]
    assert line["outcome"] == "failed" and "downtime_s" in line["error"]
    assert line["samples"] == [{"kept": "inf"}]


def test_the_duration_is_estimated_before_the_first_run(tmp_path):
    """8 runs of the 120 s in the definition take 16 minutes."""
    _, messages = run_session(tmp_path / "out", FakeRunner(tmp_path / "log"), invented_experiment(run_s=120), most=1)
    assert messages[0] == "made-up: 8 runs, 0 done, 0 failed, 8 to do, about 16 min"


@pytest.mark.parametrize(("seconds", "text"), [(1.23, "1.2 s"), (42, "42 s"), (600, "10 min"), (7800, "2 h 10 min")])
def test_a_duration_is_printed_in_units_that_fit_it(seconds, text):
    assert duration(seconds) == text
