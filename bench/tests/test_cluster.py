"""Topic `cluster`: figures, tables and plot from invented rows; the evaluation of client answers and QEMU events.

A *fault* of a cluster's node makes it be fenced (switched off), and its guest continues on another node from a
checkpoint. The guest counts ticks; those since the checkpoint are counted again, so they are lost (`back`), and those
over the allowed number miss the bar (`beyond`). With *output commit*, output is held until the next checkpoint, so no
client has seen a lost tick. Cases: `failover` (kills), `faults` (of any kind), `held` (faults with output commit),
`held-off` (its control: kills without output commit, which must lose ticks).
"""

import socket
import statistics
import threading
import time

import pytest

from rekindle_bench.cluster import analysis, output, plots
from rekindle_bench.cluster.cases import allowed_ticks, interval_s, output_commit_faults, record_outcome
from rekindle_bench.cluster.faults import KINDS, LONGEST_S, PASSING, draw, words
from rekindle_bench.cluster.plan import FULL, QUICK, left_out
from rekindle_bench.cluster.rows import Row, read
from rekindle_bench.rows import RowFile
from rekindle_lab.cluster.counter import Answer

START = 1_800_000_000_000_000
"""A time in microseconds since 1970."""
S = 1_000_000
"""Microseconds of a second."""
FENCED_S = 1.5


def row(number, case="failover", kind="kill", *, running_s=2.0, answer_s=2.2, **more):
    """Returns a row with one fault. Times are in s after the fault."""
    return Row(
        case=case,
        round=number,
        kind=kind,
        seed=number,
        node="n1",
        lasted_s=0.0,
        at_us=START,
        planned=more.pop("planned", 1),
        recovered=more.pop("recovered", True),
        elsewhere=True,
        fenced_us=START + int(FENCED_S * S),
        running_us=START + int(running_s * S),
        answer_us=START + int(answer_s * S),
        gap_s=answer_s,
        interval_s=1.0,
        spare_bytes=more.pop("spare_bytes", 0),
        guest_bytes=96 << 20,
        **more,
    )


@pytest.fixture
def frame(tmp_path):
    def of(rows):
        file = RowFile(tmp_path / "cluster-raw.csv", Row)
        for fault in rows:
            file.append(fault)
        file.close()
        return read(file.path)

    return of


def values(findings):
    return {figure.id: (figure.value, figure.n, figure.met) for figure in findings.figures}


def window(number, how, every_s, ms, per_s):
    """Returns a row of `output`: median round trip in ms, of which p99 is twice, and answers per second."""
    key = {"case": "output", "round": number, "kind": how, "seed": number, "node": "", "planned": 3, "every_s": every_s}
    measured = {"median_us": ms * 1e3, "p99_us": ms * 2e3, "trips": 100, "per_s": per_s, "recovered": True}
    return Row(lasted_s=6.0, at_us=START, **key, **measured)


PROTECTED_MS, HELD_MS = (2.0, 2.1, 2.2), (105.0, 106.0, 107.0)
"""Round trips with checkpoints every 0.2 s, without and with output commit; the medians are in the middle."""
HELD_PER_S = (300.0, 301.0, 302.0)


def windows():
    rows = [window(n, "none", None, 1.0, 900.0) for n in range(3)]
    rows += [window(n, "protect", 0.2, PROTECTED_MS[n], 800.0) for n in range(3)]
    return rows + [window(n, "output-commit", 0.2, HELD_MS[n], HELD_PER_S[n]) for n in range(3)]


def test_figures_of_faults_that_were_all_recovered(frame, tmp_path):
    kills, faults, held, held_off = 5, 4, 2, 2  # rows of each case
    every_fault = kills + faults + held + held_off
    answers_s = [2.0, 2.1, 2.2, 2.3, 2.4]
    rows = [row(n, answer_s=answers_s[n], back=12, planned=kills) for n in range(kills)]
    rows += [row(n, "faults", "freeze", back=3, planned=faults) for n in range(faults)]
    rows += [row(n, "held", "kill", planned=held) for n in range(held)]
    rows += [row(n, "held-off", "kill", planned=held_off, back=2, beyond=2) for n in range(held_off)]
    rows += windows()
    findings = analysis.figures(frame(rows), "raw")
    assert not findings.absent
    reached = values(findings)
    answer_s = statistics.median(answers_s)
    assert reached["failover_s"] == (pytest.approx(answer_s), kills, True)
    assert reached["failover_restore_s"] == (pytest.approx(answer_s - FENCED_S), kills, False)
    assert reached["split_brain"] == (0.0, every_fault, True)
    assert reached["counter_back"] == (0.0, kills + faults, True)
    assert reached["counter_back_held"] == (0.0, held, True)
    # The control has to lose ticks, or the check of `held` in the line above detects nothing.
    assert reached["counter_back_held_off"] == (held_off * 2, held_off, True)
    assert reached["not_recovered"] == (0.0, every_fault, True)
    assert reached["spare_memory"] == (0.0, every_fault, True)
    by_id = {figure.id: figure for figure in findings.figures}
    assert by_id["output_commit_rtt_0.2s"].contrast.result.ratio == pytest.approx(HELD_MS[1] / PROTECTED_MS[1])
    assert by_id["output_commit_per_s_0.2s"].contrast.result.ours == pytest.approx(HELD_PER_S[1])
    assert str(by_id["output_commit_rtt_0.2s"].bar) == "none"
    lines = analysis.output(frame(rows))
    assert [(line["how"], line["every s"]) for line in lines] == [
        ("output-commit", 0.2),
        ("protect", 0.2),
        ("none", None),
    ]
    assert lines[0]["p99 ms"] == pytest.approx(2 * HELD_MS[1])
    assert plots.draw(frame(rows), tmp_path) == ["cluster-failover.png"]


def test_two_concurrent_guests_or_one_lost_tick_too_many_miss_the_bar(frame):
    """One overlap, two ticks and one tick are each too many; the control must lose at least one beyond the bound."""
    rows = [row(0), row(0, "faults", "cut", overlaps=1, planned=2), row(1, "faults", "cut-ring", beyond=2, planned=2)]
    rows.append(row(0, "held", "kill", beyond=1))
    rows.append(row(0, "held-off", "kill", back=1))
    reached = values(analysis.figures(frame(rows), "raw"))
    assert reached["split_brain"] == (1.0, 5, False)
    assert reached["counter_back_held_off"] == (0.0, 1, False)
    assert reached["counter_back"] == (2.0, 3, False)
    assert reached["counter_back_held"] == (1.0, 1, False)
    by_kind = {line["fault"]: line for line in analysis.by_kind(frame(rows))}
    assert by_kind["cut"]["two at once"] == 1
    assert by_kind["cut-ring"]["beyond what is allowed"] == 2


def test_a_guest_that_did_not_come_back_misses_the_bars(frame):
    """It is not counted in n, so that n is less than planned, which misses the bar even with a sum of 0."""
    lost = row(1, "faults", "kill", planned=2, recovered=False, trouble="answers: not within 120 s")
    lost.fenced_us = lost.answer_us = None
    findings = analysis.figures(frame([row(0), row(0, "faults", "cut", planned=2), lost]), "raw")
    reached = values(findings)
    assert reached["split_brain"] == (0.0, 2, False)
    assert reached["counter_back"] == (0.0, 2, False)
    assert reached["not_recovered"] == (1.0, 3, False)
    assert "the time of fencing: not known of 1 of 2 kills" in findings.absent
    assert any("faults 2 (kill): not recovered: answers" in line for line in findings.absent)


def test_fewer_than_planned_miss_the_bars(frame):
    """Each case has one row; only of `held` no more were planned."""
    rows = [row(0, planned=20), row(0, "faults", "cut", planned=100), row(0, "held", "kill", planned=1)]
    findings = analysis.figures(frame(rows), "raw")
    reached = values(findings)
    assert reached["failover_s"] == (pytest.approx(2.2), 1, False)
    assert reached["split_brain"] == (0.0, 3, False)
    assert reached["counter_back_held"] == (0.0, 1, True)
    [split] = [figure for figure in findings.figures if figure.id == "split_brain"]
    assert split.as_json()["planned"] == 20 + 100 + 1


def begins(pid, begin_s, tick=None, node="n1"):
    """Returns the watch's events of a guest that begins to run, with its first tick 50 ms later if that is seen."""
    begin_us = START + int(begin_s * S)
    events = [{"pid": pid, "node": node, "runs": True, "host_us": begin_us}]
    if tick is not None:
        events.append({"pid": pid, "node": node, "tick": tick, "host_us": begin_us + 50_000})
    return events


def counted(begin_s, end_s, first):
    """Returns the answers of a guest's counter, read every 20 ms, from its tick `first` on."""
    count = int((end_s - begin_s) / 0.02)
    return [Answer(START + int(begin_s * S) + n * 20_000, first + n * 20 // 50) for n in range(count)]


OLD_PID, NEW_PID = 7, 9
"""The QEMU that has the guest when the fault happens, and the one in which the guest continues."""
OLD_QEMU = begins(OLD_PID, -5)
FAULT_S, CONTINUES_S, FIRST_ANSWER_S = 1.0, 3.0, 4.2
SEEN_TICK = 120
"""The last tick that the client sees before the fault."""


def fault_row(case, kind, fault_s=FAULT_S):
    return Row(case=case, round=0, kind=kind, seed=0, node="n1", lasted_s=0.0, at_us=START + int(fault_s * S))


def outcome_of_fail_over(first_tick, bound=0):
    """Returns the row of a kill after which the guest's counter continues with `first_tick`."""
    answers = [*counted(0, FAULT_S, 101), *counted(FIRST_ANSWER_S, 5, 125)]
    assert answers[49].tick == SEEN_TICK
    outcome = fault_row("held", "kill")
    events = [*OLD_QEMU, *begins(NEW_PID, CONTINUES_S, tick=first_tick, node="n2")]
    record_outcome(outcome, OLD_PID, events, answers, bound)
    return outcome


def test_a_loss_is_computed_from_the_first_tick_not_from_the_first_answer():
    """The new QEMU starts at tick 101: 101 to 120 are counted again, so lost. The first answer (125) hides that."""
    outcome = outcome_of_fail_over(first_tick=101)
    lost = SEEN_TICK - 100
    assert (outcome.back, outcome.beyond, outcome.back_answers) == (lost, lost, 0)
    assert outcome.elsewhere and not outcome.trouble
    assert (outcome.running_us, outcome.answer_us) == (START + CONTINUES_S * S, START + int(FIRST_ANSWER_S * S))


def test_a_fail_over_may_lose_what_a_checkpoint_interval_explains():
    outcome = outcome_of_fail_over(first_tick=101, bound=allowed_ticks(interval_s=1.0))
    assert (outcome.back, outcome.beyond) == (SEEN_TICK - 100, 0)


def test_a_guest_that_continues_with_the_next_tick_has_lost_nothing():
    outcome = outcome_of_fail_over(first_tick=SEEN_TICK + 1)
    assert (outcome.back, outcome.beyond) == (0, 0)


def test_a_kill_without_another_qemu_is_trouble():
    """Answers from before the guest's end do not count for the next guest."""
    kill = fault_row("held", "kill", fault_s=0.5)
    record_outcome(kill, OLD_PID, OLD_QEMU, counted(0, 1, 101), 0)
    assert kill.answer_us is None and "no other QEMU" in kill.trouble


def test_a_fail_over_whose_first_tick_was_not_seen_is_trouble():
    """The loss is unknown."""
    kill = fault_row("held", "kill")
    record_outcome(kill, OLD_PID, [*OLD_QEMU, *begins(NEW_PID, CONTINUES_S)], counted(0, 1, 101), 0)
    assert "first tick" in kill.trouble


def test_a_fault_that_does_not_move_the_guest_needs_no_other_qemu():
    cut = fault_row("faults", "store-cut", fault_s=0.5)
    record_outcome(cut, OLD_PID, OLD_QEMU, counted(0, 1, 101), 0)
    assert not cut.trouble and cut.answer_us is not None


def test_ways_of_output_commit_take_turns():
    """Every other round has the reverse order, so that a drift of the machine affects all ways alike."""
    first, second = output.ways_of_round(FULL, 0), output.ways_of_round(FULL, 1)
    assert first == second[::-1] and first[0] == ("none", None)
    assert {how for how, _ in first} == set(output.WAYS)
    assert FULL.output_rounds >= 5


SERVICE_S = 0.01
CONNECTIONS = 4


def test_round_trips_and_answers_are_counted():
    """A server works for 10 ms on each answer, which bounds the answers per second of a connection."""
    connections, servers = zip(*(socket.socketpair() for _ in range(CONNECTIONS)), strict=True)

    def serve(server):
        while server.recv(64):
            time.sleep(SERVICE_S)
            server.sendall(b"ok 1\n")

    threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        round_trips_us = output.measure_round_trips(list(connections), 0.5, 1)
        assert round_trips_us and min(round_trips_us) >= SERVICE_S * 1e6
        assert 0 < output.measure_answers_per_s(list(connections), 0.3) <= CONNECTIONS / SERVICE_S
    finally:
        for connection in connections:
            connection.close()
        for thread in threads:
            thread.join()


def test_omissions_are_listed(frame):
    """A file with one fault has no rows of the other cases."""
    findings = analysis.figures(frame([row(0, "faults", "store-cut")]), "raw")
    assert {line.split(":")[0] for line in findings.absent} == {
        "figure failover_s",
        "figure failover_restore_s",
        "figure counter_back_held",
        "figure counter_back_held_off",
        "figure output_commit_rtt",
    }
    assert left_out(QUICK) == [
        "fail-overs: 2 of 20",
        "faults at random: 2 of 100",
        "faults with output commit: 1 of 20",
        "fail-overs at that interval without output commit: 1 of 5",
        "turns of what output commit costs: 2 of 6",
        "what output commit costs with a checkpoint every 0.05 s, 1 s",
    ]
    assert not left_out(FULL)


def test_faults_come_from_their_seeds():
    """200 seeds draw every kind; only temporary faults have a duration, only `kill-store-away` has a lead."""
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    assert {fault.kind for fault in drawn} == set(KINDS)
    passing = (*PASSING, "kill-store-away")
    assert all((0 < fault.lasts_s <= LONGEST_S) == (fault.kind in passing) for fault in drawn)
    assert all((fault.lead_s > 0) == (fault.kind == "kill-store-away") for fault in drawn)
    assert words("store cut", "n1") == ["store", "cut"]
    assert words("cut", "n1") == ["cut", "n1"]


def test_with_output_commit_every_other_fault_is_a_kill():
    """10 of the 20 faults of the full plan; the others are of various kinds, with different seeds."""
    faults = output_commit_faults(FULL.output_commit_faults)
    assert [fault.kind for _, fault in faults[::2]] == ["kill"] * 10
    assert (
        len({fault.kind for _, fault in faults}) > 4 and len({seed for seed, _ in faults}) == FULL.output_commit_faults
    )


def test_the_interval_is_the_actual_one():
    """The longest interval plus the longest commit; a tick takes 50 ms, and one more is allowed at either end."""
    events = [
        {"interval_ms": None, "commit_us": 40_000},
        {"interval_ms": 1000, "commit_us": 20_000},
        {"interval_ms": 1400, "commit_us": 100_000},
    ]
    assert interval_s(events) == pytest.approx(1.4 + 0.1)
    assert allowed_ticks(1.5) == 1.5 / 0.05 + 2
