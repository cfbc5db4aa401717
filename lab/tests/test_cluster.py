"""Topic `cluster`: its figures, tables and plot from made-up rows; what is made of what client and QEMUs tell."""

import json

import pytest

from rekindle_lab.bench.cluster import analysis, plots
from rekindle_lab.bench.cluster.cases import allowed, interval_s
from rekindle_lab.bench.cluster.faults import KINDS, LONGEST_S, PASSING, draw, words
from rekindle_lab.bench.cluster.plan import FULL, QUICK, left_out
from rekindle_lab.bench.cluster.rows import Row, read
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.cluster import counter, running, timeline
from rekindle_lab.cluster.counter import Answer
from rekindle_lab.cluster.running import Span

START = 1_800_000_000_000_000
S = 1_000_000


def row(number, case="failover", kind="kill", *, fenced=1.5, running=2.0, answer=2.2, **more):
    """One fault, and when what came of it, in s after it."""
    return Row(
        case,
        number,
        kind,
        number,
        "n1",
        0.0,
        START,
        elsewhere=True,
        fenced_us=START + int(fenced * S),
        running_us=START + int(running * S),
        answer_us=START + int(answer * S),
        gap_s=answer,
        interval_s=1.0,
        spare_bytes=more.pop("spare_bytes", 0),
        guest_bytes=96 << 20,
        **more,
    )


@pytest.fixture
def frame(tmp_path):
    def of(rows):
        file = RowFile(tmp_path / "cluster-raw.csv", Row)
        for one in rows:
            file.append(one)
        file.close()
        return read(file.path)

    return of


def values(found):
    return {figure.id: (figure.value, figure.n, figure.met) for figure in found.figures}


def test_figures_are_those_of_the_issue(frame, tmp_path):
    rows = [row(n, answer=2.0 + n / 10, back=12) for n in range(5)]
    rows += [row(n, "faults", "freeze", back=3) for n in range(4)]
    rows += [row(n, "held", "kill") for n in range(2)]
    found = analysis.figures(frame(rows), "raw")
    assert not found.absent
    told = values(found)
    assert told["failover_s"] == (pytest.approx(2.2), 5, True)
    assert told["failover_restore_s"] == (pytest.approx(0.7), 5, False)
    assert told["split_brain"] == (0.0, 11, True)
    assert told["counter_back"] == (0.0, 9, True)
    assert told["counter_back_held"] == (0.0, 2, True)
    assert told["spare_memory"] == (0.0, 11, True)
    assert plots.draw(frame(rows), tmp_path) == ["cluster-failover.png"]


def test_one_moment_of_two_guests_or_one_step_too_many_misses_the_bar(frame):
    rows = [row(0), row(0, "faults", "cut", overlaps=1), row(1, "faults", "cut-ring", beyond=2)]
    rows.append(row(0, "held", "kill", beyond=1))
    told = values(analysis.figures(frame(rows), "raw"))
    assert told["split_brain"] == (1.0, 4, False)
    assert told["counter_back"] == (2.0, 3, False)
    assert told["counter_back_held"] == (1.0, 1, False)
    by_kind = {line["fault"]: line for line in analysis.by_kind(frame(rows))}
    assert by_kind["cut"]["two at once"] == 1
    assert by_kind["cut-ring"]["beyond an interval"] == 2


def test_what_was_not_measured_is_named(frame):
    found = analysis.figures(frame([row(0, "faults", "store-cut")]), "raw")
    assert {line.split(":")[0] for line in found.absent} == {
        "figure failover_s",
        "figure failover_restore_s",
        "figure counter_back_held",
    }
    assert left_out(QUICK) == [
        "fail-overs: 3 of 20",
        "faults at random: 3 of 100",
        "faults with output commit: 2 of 20",
    ]
    assert not left_out(FULL)


def test_faults_come_from_their_seeds():
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert all((0 < fault.lasts_s <= LONGEST_S) == (fault.kind in PASSING) for fault in drawn)
    assert words("store cut", "n1") == ["store", "cut"]
    assert words("cut", "n1") == ["cut", "n1"]


def test_an_interval_is_as_it_came_out():
    told = [
        {"interval_ms": None, "commit_us": 40_000},
        {"interval_ms": 1000, "commit_us": 20_000},
        {"interval_ms": 1400, "commit_us": 100_000},
    ]
    assert interval_s(told) == pytest.approx(1.5)
    assert allowed(1.5) == 32


def test_the_counter_is_followed_through_fail_overs():
    answers = [Answer(START + n * 20_000, 100 + n // 2) for n in range(50)]
    back = [Answer(START + 3 * S + n * 20_000, 110 + n // 2) for n in range(50)]
    silent = [Answer(START + 9 * S, 140)]
    first, second = counter.drops(answers + back + silent)
    assert (first.highest, first.after.tick, first.back) == (124, 110, 14)
    assert first.gap_s == pytest.approx(3 - 0.98)
    assert second.back == 0


def test_only_guests_that_run_at_once_overlap(tmp_path):
    lines = [
        {"pid": 1, "node": "n1", "runs": True, "host_us": 10},
        {"pid": 1, "node": "n1", "runs": False, "host_us": 20},
        {"pid": 1, "node": "n1", "runs": True, "host_us": 21},
        {"pid": 1, "node": "n1", "runs": False, "host_us": 40},
        {"pid": 2, "node": "n2", "runs": True, "host_us": 39},
    ]
    path = tmp_path / "running.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = running.read(path, 100)
    assert Span(2, "n2", 39, 100) in spans
    assert running.overlaps(spans) == [(Span(1, "n1", 21, 40), Span(2, "n2", 39, 100))]
    assert not running.overlaps(spans[:2])


def test_a_timeline_has_the_parts_of_a_fail_over():
    events = [(START / S, "kill n1"), (START / S + 1.5, "switch off n1 rc=0")]
    spans = [Span(1, "n1", START - 9 * S, START), Span(2, "n2", START + 2 * S, START + 9 * S)]
    answers = [Answer(START - 10_000, 50), Answer(START + int(2.1 * S), 40)]
    node, found = timeline.parts(events, spans, answers)
    assert node == "n1"
    assert [round((part.end_us - part.begin_us) / S, 2) for part in found] == [1.5, 0.5, 0.1, 2.11]
    assert "n2 chosen" in timeline.draw(found)
    with pytest.raises(ValueError, match="no node was killed"):
        timeline.parts([], spans, answers)
