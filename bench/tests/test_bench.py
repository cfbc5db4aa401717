"""Common parts of all benchmarks: a failing case, the JSON line, the trial."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import typer
from typer.testing import CliRunner

from rekindle_bench import __main__ as command
from rekindle_bench import run, trial
from rekindle_bench.case import NoRoomError, NotPlannedError, Trial
from rekindle_bench.environment import Environment
from rekindle_bench.plausible import problems
from rekindle_bench.report import NO_BAR, Figure, Findings
from rekindle_bench.rows import RowFile, read_sidecar
from rekindle_bench.topic import report
from rekindle_lab.rekindle import Rekindle
from rekindle_lab.runs.ledger import Ledger, LedgerError
from rekindle_lab.runs.workspace import Workspace

app = typer.Typer()
app.command()(command.main)
BEGIN_US = 1_800_000_000_000_000
END_US = BEGIN_US + 1_000_000
"""Begin and end of the run of `Row`s, in microseconds since 1970."""
PLAN = SimpleNamespace(budget_s=None)


@dataclass
class Row:
    case: str
    how: Literal["ours", "peer"] = "ours"
    at: int = 0
    us: int | None = None
    stop_host_us: int | None = None
    rate: float | None = None
    note: str = ""


@pytest.fixture
def make(tmp_path):
    """Returns a function that makes an environment; `checked`: its trial, in which rows are checked."""

    def make(checked=None):
        check = checked and (lambda row: problems(row, BEGIN_US, END_US))
        rows = RowFile(tmp_path / "raw.csv", Row, check=check)
        nothing = Rekindle(Path("/bin/true"), tmp_path)
        space = Workspace(binary=nothing.binary, work=tmp_path, disk=tmp_path, namespaces=("none",))
        env = Environment(root=tmp_path, rekindle=nothing, qemu="qemu", rows=rows, space=space)
        env.trial = checked
        return env

    return make


def run_all(env, cases):
    """Runs the cases, and returns those that the ledger records as failed."""
    with Ledger(env.root) as ledger:
        run.run_cases(env, ledger, cases, PLAN, [])
        assert ledger.interrupted() == []
        return [line["run"] for line in ledger.runs if line["outcome"] == "failed"]


def leaves(*rows):
    def case(env, plan):
        for row in rows:
            env.rows.append(row)

    return case


def fails(error):
    def case(env, plan):
        raise error

    return case


def test_a_failing_case_is_named_and_the_others_still_run(make):
    """The second of three cases raises: only it fails, and the rows of the other two are kept."""
    env = make()
    cases = {"one": leaves(Row("one")), "two": fails(OSError("gone")), "three": leaves(Row("three"))}
    assert run_all(env, cases) == ["two"]
    assert env.rows.count == 2
    assert env.errors == ["case two: OSError: gone"]


def test_an_error_that_does_not_end_its_case_fails_it_too(make):
    """A case can record an error and continue with its next round."""
    env = make()
    assert run_all(env, {"one": lambda env, plan: env.errors.append("round 3: lost")}) == ["one"]


def test_a_case_that_is_not_in_the_plan_is_left_out(make):
    """Neither an empty plan nor a small machine is an error."""
    env = make()
    failed = run_all(env, {"one": fails(NotPlannedError()), "two": fails(NoRoomError("needs 9 MiB"))})
    assert env.left_out == ["case one: not part of this plan", "case two: the machine needs 9 MiB"]
    assert not env.errors and not failed


def test_a_trial_requires_rows_of_every_case(make):
    """In a trial a case without rows, or with an impossible row, fails; one that has no room does not."""
    env = make(Trial({"large": "takes hours"}))
    cases = {
        "good": leaves(Row("good", us=5)),
        "nothing": leaves(),
        "none": fails(NotPlannedError()),
        "large": leaves(),
        "wrong": leaves(Row("wrong", us=-5)),
        "full": fails(NoRoomError("needs 9 MiB")),
    }
    assert run_all(env, cases) == ["nothing", "none", "wrong"]
    assert env.errors == [
        "case nothing: it measured nothing",
        "case none: the plan of the trial has none of it",
        "case wrong: row wrong ours: us is negative: -5",
    ]
    assert "case large: not tried: takes hours" in env.left_out


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (Row("x", us=1.5), "us is 1.5, not int | None"),
        (Row("x", us=True), "us is True, not int | None"),
        (Row("x", how="theirs", us=1), "how is 'theirs', not Literal"),
        (Row("x", rate=math.nan), "rate is nan"),
        (Row("x", rate=math.inf), "rate is inf"),
        (Row("x", us=60_000_000), "us is longer than the run: 60000000"),
        (Row("x", stop_host_us=BEGIN_US - 60_000_000), "stop_host_us is no time of this run"),
        (Row(None, us=1), "case is None, not str"),
    ],
)
def test_an_impossible_row_has_a_problem(row, problem):
    """The run of these rows took 1 s, so a duration of 60 s and a time 60 s before its begin are impossible."""
    row_problems = problems(row, BEGIN_US, END_US)
    assert len(row_problems) == 1 and problem in row_problems[0]


def test_possible_rows_have_no_problem():
    """An integer is a valid float, and `at` may be negative: it counts from a reboot."""
    assert not problems(Row("x", at=-1, us=900_000, stop_host_us=BEGIN_US + 5, rate=2), BEGIN_US, END_US)


def test_a_row_without_measurements_has_a_problem():
    """`case` has no default: it identifies the row, and does not count as measured. Zero counts."""

    @dataclass
    class Bare:
        case: str
        us: int | None = None
        note: str = ""

    assert problems(Bare("x"), BEGIN_US, BEGIN_US) == ["row x: nothing in it was measured"]
    assert not problems(Bare("x", us=0), BEGIN_US, BEGIN_US)


def test_a_row_with_a_note_of_failure_has_a_problem():
    """A field `trouble` states why a case did not work, whatever else the row has."""

    @dataclass
    class Fault:
        case: str
        trouble: str = ""

    assert problems(Fault("x", "no answer"), BEGIN_US, BEGIN_US) == ["row x: no answer"]


def topic(measure=None, analyse=None):
    def of_rows(raw, out, words):
        found = Findings(
            "one-raw.csv", [Figure(id="good", value=1.5, unit="ms", n=3, p95=math.inf, bar=NO_BAR, raw="one-raw.csv")]
        )
        return report("vmm", read_sidecar(raw, "vmm-run.json", {}), words, found, [], {"t": [{"x": math.nan}]})

    return SimpleNamespace(
        cases={"one": None},
        plans=SimpleNamespace(FULL=PLAN, QUICK=PLAN),
        measure=measure or (lambda task: task.out / "vmm-raw.csv"),
        analyse=analyse or of_rows,
    )


def failing_with(error):
    def fail(*_):
        raise error

    return fail


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs `bench vmm` with another topic instead of the real one; returns exit status and the last line of output."""
    monkeypatch.setattr(command, "interrupt_on_signals", lambda name: None)
    monkeypatch.setattr(command.os, "geteuid", lambda: 0)

    def bench(topic, *words):
        monkeypatch.setitem(command.TOPICS, "vmm", topic)
        given = ["vmm", "--out", str(tmp_path), "--rekindle", "/bin/true", "--qemu", "true", *words]
        result = CliRunner().invoke(app, given)
        assert result.exit_code in (0, 1), result.output

        def never(value):
            raise ValueError(f"no JSON: {value}")

        line = result.output.splitlines()[-1]
        assert (tmp_path / "vmm.json").read_text() == line + "\n"
        return result.exit_code, json.loads(line, parse_constant=never)

    return bench


def test_the_json_line_has_what_every_reader_expects(bench):
    """The last line of output is valid JSON, also with numbers that JSON cannot represent."""
    status, document = bench(topic())
    assert status == 0
    assert {"topic", "versions", "command", "figures"} <= set(document)
    assert document["command"] == "make bench TOPIC=vmm" and document["failed"] == document["errors"] == []
    figure = document["figures"]["good"]
    assert {"value", "unit", "n", "p95", "ratio_of", "raw"} <= set(figure)
    # The figure has no peer, and the table has a number that JSON cannot represent.
    assert figure["ratio_of"] is None and figure["p95"] is None and document["tables"]["t"] == [{"x": None}]


def test_the_json_line_names_the_case_that_failed(bench, tmp_path):
    """Errors of a run are read from TOPIC-run.json; the figures of the other cases are still reported."""
    about = {"failed": ["two"], "errors": ["case two: OSError: gone"]}
    (tmp_path / "vmm-run.json").write_text(json.dumps(about))
    status, document = bench(topic())
    assert status == 1
    assert document["failed"] == ["two"] and document["errors"] == about["errors"] and "good" in document["figures"]


def test_there_is_a_json_line_when_nothing_could_be_set_up(bench):
    """An error of the measurement itself is reported in the JSON, too."""
    status, document = bench(topic(measure=failing_with(OSError("no tmpfs"))))
    assert status == 1 and document["errors"] == ["vmm: OSError: no tmpfs"]


def test_there_is_a_json_line_when_the_rows_cannot_be_analysed(bench, tmp_path):
    """An error of the analysis leaves a report without figures, with the errors of the run."""
    (tmp_path / "vmm-run.json").write_text(json.dumps({"failed": ["one"], "errors": ["case one: gone"]}))
    status, document = bench(topic(analyse=failing_with(KeyError("us"))))
    assert status == 1 and document["figures"] == {}
    assert document["failed"] == ["one"] and document["errors"] == ["case one: gone", "analysis: KeyError: 'us'"]


def test_the_environment_selects_a_trial(bench, monkeypatch):
    """`TRIAL=1` selects the plan of the trial, and the command that repeats the run names it."""
    monkeypatch.setenv("TRIAL", "1")
    tasks = []

    def measure(task):
        tasks.append(task)
        return task.out / "vmm-raw.csv"

    status, document = bench(topic(measure=measure), "--only", "one")
    assert status == 0 and document["command"] == "ONLY='one' TRIAL=1 make bench TOPIC=vmm"
    assert tasks[0].plan is trial.PLANS["vmm"] and tasks[0].trial is not None and tasks[0].only == ["one"]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Returns a run of the topic `x` into `tmp_path`, with a QEMU that is not called."""
    monkeypatch.setattr(run, "qemu_version", lambda binary: "QEMU")
    command_line = "make bench TOPIC=x"
    binary = Path("/bin/true")
    return run.Task(root=tmp_path, out=tmp_path, binary=binary, qemu="qemu", plan=PLAN, only=[], command=command_line)


def lines_in(path):
    return len(path.read_text().splitlines())


def test_errors_outside_of_the_cases_are_recorded(task, tmp_path):
    """A row that was written before the error is kept."""
    with run.recorded("x", Row, task, lambda plan: ["half of it"]) as here:
        here.rows.append(Row("one", us=1))
        raise OSError("no namespace")
    about = json.loads((tmp_path / "x-run.json").read_text())
    assert about["errors"] == ["x: OSError: no namespace"] and "half of it" in about["left_out"]
    assert lines_in(tmp_path / "x-raw.csv") == 1 + 1  # the header and the row


class Killed(BaseException):
    """Ends a benchmark as a kill does: no remains are removed."""


def test_the_next_run_removes_what_a_killed_one_has_left(task, tmp_path, capsys):
    """The ledger names the folders of the killed run; the next run starts new files."""
    space = Workspace(binary=task.binary, work=tmp_path / "work", disk=tmp_path / "disk", namespaces=())

    def killed(env, plan):
        for folder in (space.work, space.disk):
            folder.mkdir()
        env.rows.append(Row("one", us=1))
        raise Killed

    def measure(case):
        with run.recorded("x", Row, task, lambda plan: []) as here:
            here.environment = Environment(
                root=tmp_path, rekindle=Rekindle(task.binary, space.work), qemu="qemu", rows=here.rows, space=space
            )
            here.cases({"one": case})

    with pytest.raises(Killed):
        measure(killed)
    assert space.work.exists() and space.disk.exists()
    measure(leaves(Row("one", us=2), Row("one", us=3)))
    assert not space.work.exists() and not space.disk.exists()
    assert "run one, attempt 1: interrupted" in capsys.readouterr().err
    (line,) = [json.loads(line) for line in (tmp_path / "x-runs.jsonl").read_text().splitlines()]
    assert (line["run"], line["outcome"], line["rows"]) == ("one", "done", 2)
    assert lines_in(tmp_path / "x-raw.csv") == 1 + 2  # the header and the rows of the second run


def test_two_runs_of_a_topic_at_the_same_time_are_rejected(task, tmp_path):
    """The second run fails before it truncates the rows of the first."""
    with run.recorded("x", Row, task, lambda plan: []) as here:
        here.rows.append(Row("one", us=1))
        with pytest.raises(LedgerError, match="running already"), run.recorded("x", Row, task, lambda plan: []):
            pass
    assert lines_in(tmp_path / "x-raw.csv") == 1 + 1  # the header and the row


def test_every_topic_has_a_trial_and_little_is_left_out_of_it():
    """7: the cases that README.md lists as impossible to make small."""
    assert set(trial.PLANS) == set(command.TOPICS)
    left_out = [(topic, case) for topic, cases in trial.NOT_TRIED.items() for case in cases]
    assert all(case in command.TOPICS[topic].cases for topic, case in left_out)
    assert len(left_out) <= 7
    # A trial must run at least one case of every topic.
    for name, measured in command.TOPICS.items():
        assert set(measured.cases) - set(trial.trial(name).not_tried)
        assert trial.PLANS[name].budget_s is None


def test_a_trial_that_fails_is_printed_and_counted(tmp_path, capfd):
    """One topic does not exist, the other gets a binary that does not exist."""
    assert trial.run_all(["no-such-topic", "vmm"], ["--rekindle", str(tmp_path / "none")], tmp_path) == 2
    output = capfd.readouterr().out
    assert "no topic 'no-such-topic'" in output and f"{tmp_path / 'none'} does not exist" in output
    assert output.splitlines()[-1].startswith("trial of 2 benchmarks in ")
    assert "no-such-topic" in output.splitlines()[-1] and "vmm" in output.splitlines()[-1]
    assert any(f"vmm: bench: {tmp_path / 'none'} does not exist" in line for line in output.splitlines()[-3:-1])


def test_omissions_of_a_trial_are_read_from_its_last_line(tmp_path):
    """Only omitted cases are listed: a figure without rows is normal in a trial."""
    log = tmp_path / "os.log"
    log.write_text(
        '[0.1 s] micro\n{"left_out": ["a trial: small", "case debian: not tried: minutes", "figure x: no rows"]}\n'
    )
    assert trial.left_out(log) == ["case debian: not tried: minutes"]
    log.write_text("bench: interrupted\n")
    assert trial.left_out(log) == []


def test_errors_of_a_trial_are_read_from_its_last_line(tmp_path):
    """Without a report, they are the last lines."""
    log = tmp_path / "os.log"
    log.write_text('[0.1 s] micro\n{"errors": ["case micro: it measured nothing"]}\n')
    assert trial.errors_of(log) == ["case micro: it measured nothing"]
    log.write_text("\n".join(f"line {number}" for number in range(50)))
    assert trial.errors_of(log) == [f"line {number}" for number in range(40, 50)]
