"""The checks of a file of runs: bad input is reported with its row and column, and never ignored silently.

The file is that of `invented_runs.campaign`: 32 runs, 16 of each level of the factor "technique" ("cold", "kexec").
Its responses are downtime_s and throughput_per_s. Each test changes some lines; `lines[n]` is row n + 1 of the file
and, as long as no run was repeated, run n + 1 of the order.
"""

import json

import pytest
from invented_runs import campaign, line, order_json, write
from typer.testing import CliRunner

from rekindle_lab.analysis.runs import Order, RunsError, read
from rekindle_lab.cli import app


@pytest.fixture
def lines():
    """Returns the lines of the file, parsed."""
    return campaign()


def problems(tmp_path, lines, *, with_order=True, **options):
    """Reads these lines, which must be rejected; returns the problems, as texts. `options`: of `read`."""
    path = write(tmp_path / "runs.jsonl", lines)
    if with_order:
        order_json(tmp_path / "order.json", campaign())
    order = Order.load(tmp_path / "order.json") if with_order else None
    with pytest.raises(RunsError) as caught:
        read(path, order=order, **options)
    assert str(path) in str(caught.value)
    return [str(problem) for problem in caught.value.problems]


def test_runs_without_problems_are_read_without_notes(tmp_path, lines):
    order_json(tmp_path / "order.json", lines)
    runs = read(write(tmp_path / "runs.jsonl", lines), order=Order.load(tmp_path / "order.json"))
    assert (len(runs.done), runs.planned, runs.notes, runs.factor) == (32, 32, [], "technique")
    assert runs.responses == ["downtime_s", "throughput_per_s"]


def test_a_missing_run_is_a_problem_or_a_note(tmp_path, lines):
    """The level of the missing run 5 is known only from the order."""
    del lines[4]
    level = campaign()[4]["treatment"]["technique"]
    assert problems(tmp_path, lines) == [f"row -, column run: run 5 of 32 (technique={level}) is missing"]
    runs = read(tmp_path / "runs.jsonl", allow=frozenset({"missing"}))
    assert len(runs.done) == 31
    assert "row -, column run: run 5 of 32 is missing" in runs.notes


def test_a_run_that_failed_and_was_not_repeated_is_missing(tmp_path, lines):
    lines[4] |= {"outcome": "failed", "responses": {}, "exit_status": 1}
    level = lines[4]["treatment"]["technique"]
    assert problems(tmp_path, lines) == [f"row 5, column run: run 5 of 32 (technique={level}) failed"]


def test_a_level_of_which_all_runs_failed_is_not_left_out(tmp_path):
    """Without an order, the level is known only from its failed runs; it must not vanish from the comparison."""
    lines = [line(n, level, {"x_s": n}, total=6) for n, level in enumerate(["cold", "kexec", "phase"] * 2, start=1)]
    for run in lines:
        if run["treatment"]["technique"] == "phase":
            run |= {"outcome": "failed", "responses": {}}
    assert problems(tmp_path, lines, with_order=False, allow=frozenset({"missing"})) == [
        "row -, column treatment: level 'phase' has 0 runs; it needs at least 2"
    ]


def test_a_run_must_have_the_planned_treatment_and_block(tmp_path, lines):
    planned = lines[6]["treatment"]["technique"]
    other = {"cold": "kexec", "kexec": "cold"}[planned]
    lines[6]["treatment"] = {"technique": other}
    lines[8]["block"] = 2
    assert problems(tmp_path, lines) == [
        f"row 7, column treatment.technique: '{other}'; the order has '{planned}' for run 7",
        "row 9, column block: 2; the order has 1 for run 9",
    ]


def test_a_run_that_failed_and_was_repeated_is_done_and_its_failure_counted(tmp_path, lines):
    failed = lines[4] | {"outcome": "failed", "responses": {}, "exit_status": 1}
    runs = read(write(tmp_path / "runs.jsonl", [*lines[:4], failed, lines[4] | {"attempt": 2}, *lines[5:]]))
    assert (len(runs.done), len(runs.failed)) == (32, 1)


def test_an_unknown_level_is_named_with_the_known_ones(tmp_path, lines):
    lines[2]["treatment"] = {"technique": "kexex"}
    assert problems(tmp_path, lines) == ["row 3, column treatment.technique: unknown level 'kexex'; known: cold, kexec"]


def test_an_unknown_factor_is_named(tmp_path, lines):
    lines[2]["treatment"]["colour"] = "red"
    assert "row 3, column treatment.colour: no such factor in the order" in problems(tmp_path, lines)


def test_one_level_alone_is_nothing_to_compare(tmp_path, lines):
    only = [line(n, "cold", {"downtime_s": n}, total=4) for n in range(1, 5)]
    assert problems(tmp_path, only, with_order=False) == [
        "row -, column treatment: only one level, 'cold': nothing to compare"
    ]


def test_a_level_needs_two_runs(tmp_path):
    lines = [
        line(1, "cold", {"x_s": 1}, total=3),
        line(2, "cold", {"x_s": 2}, total=3),
        line(3, "kexec", {"x_s": 1}, total=3),
    ]
    assert problems(tmp_path, lines, with_order=False) == [
        "row -, column treatment: level 'kexec' has 1 run; it needs at least 2"
    ]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (float("nan"), "nan is not a finite number"),
        (float("inf"), "inf is not a finite number"),
        (None, "None is not a number"),
        ("12", "'12' is not a number"),
        (True, "True is not a number"),
        (10**310, f"{10**310} is not a finite number"),
    ],
)
def test_a_value_that_is_not_a_finite_number_is_rejected(tmp_path, lines, value, what):
    lines[6]["responses"]["downtime_s"] = value
    assert problems(tmp_path, lines) == [f"row 7, column responses.downtime_s: {what}"]


def test_missing_and_unknown_responses_are_named(tmp_path, lines):
    lines[6]["responses"]["downtime_ms"] = lines[6]["responses"].pop("downtime_s")
    assert problems(tmp_path, lines) == [
        "row 7, column responses.downtime_s: is missing",
        "row 7, column responses.downtime_ms: no such response in the order",
    ]


def test_mixed_versions_are_a_problem_or_a_note(tmp_path, lines):
    lines[9]["versions"] = {"rekindle": "rekindle 0.2.0"}
    assert problems(tmp_path, lines) == [
        "row 10, column versions.rekindle: 'rekindle 0.2.0', most runs have 'rekindle 0.1.0'"
    ]
    runs = read(tmp_path / "runs.jsonl", allow=frozenset({"versions"}))
    assert any("rekindle 0.2.0" in note for note in runs.notes)


@pytest.mark.parametrize("value", [{"numpy": "2.4"}, ["2.4"], 2.4, None])
def test_a_version_must_be_a_text(tmp_path, lines, value):
    lines[9]["versions"] = {"lib": value}
    assert problems(tmp_path, lines, allow=frozenset({"missing"})) == [
        f"row 10, column versions.lib: {value!r} is not a text"
    ]


def test_a_run_must_not_be_done_twice(tmp_path, lines):
    assert problems(tmp_path, [*lines, lines[0]]) == [
        "row 33, column run: run 1 is done a second time; the first is row 1"
    ]


def test_a_run_of_another_order_is_rejected(tmp_path, lines):
    lines[1]["order"] = "sha256:4567"
    assert problems(tmp_path, lines) == ["row 2, column order: 'sha256:4567'; expected 'sha256:0123'"]


def test_lines_that_are_not_json_objects_are_rejected(tmp_path, lines):
    path = write(tmp_path / "runs.jsonl", lines)
    path.write_text(path.read_text() + '[1]\n{"format": 1, "exp')
    with pytest.raises(RunsError) as caught:
        read(path)
    rows = [(problem.row, problem.what.split(" (")[0]) for problem in caught.value.problems]
    assert rows == [(33, "not an object"), (34, "not JSON")]


def test_keys_must_be_present_and_of_their_type(tmp_path, lines):
    del lines[0]["versions"]
    lines[1]["run"] = "2"
    lines[2]["format"] = 9
    assert problems(tmp_path, lines, allow=frozenset({"missing"}))[:3] == [
        "row 1, column versions: is missing",
        "row 2, column run: '2' is not of the kind int",
        "row 3, column format: 9; this program reads 1",
    ]


def test_all_problems_are_reported_together_and_a_limited_number_listed(tmp_path, lines):
    """Of 32 problems, 20 are listed."""
    for run in lines:
        run["responses"]["downtime_s"] = float("nan")
    path = write(tmp_path / "runs.jsonl", lines)
    with pytest.raises(RunsError) as caught:
        read(path)
    assert len(caught.value.problems) == 32
    assert "and 12 more" in str(caught.value)


def test_a_missing_and_an_empty_file_are_rejected(tmp_path):
    with pytest.raises(RunsError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(RunsError, match="the file has no runs"):
        read(tmp_path / "empty.jsonl")


def test_the_command_line_names_problem_and_remedy(tmp_path, lines):
    del lines[4]
    write(tmp_path / "runs.jsonl", lines)
    order_json(tmp_path / "order.json", campaign())
    result = CliRunner().invoke(app, ["analyse", str(tmp_path / "runs.jsonl")])
    assert result.exit_code == 2
    assert "is missing" in result.output
    assert "--allow-missing" in result.output
    result = CliRunner().invoke(app, ["analyse", str(tmp_path / "runs.jsonl"), "--allow-missing", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["done"] == 31
