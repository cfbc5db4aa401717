"""The watch over the test bed of a cluster: consoles, processes, answers of the counter, and the timeline.

A guest of the bed counts ticks: it prints each on its console, and a client requests the present count. A fail-over
restores the guest on another node from a checkpoint, so that the count is set back. The watch records which QEMU runs
the guest, and when (a span); the bed records kills of nodes and their fencing ("switch off").
"""

import json
import socket
import subprocess
import time

import pytest

from rekindle_lab.cluster import counter, running, timeline
from rekindle_lab.cluster.bed import Bed, BedError
from rekindle_lab.cluster.counter import Answer
from rekindle_lab.cluster.events import BedEvent
from rekindle_lab.cluster.running import Span
from rekindle_lab.tail import Tail

START = 1_800_000_000_000_000
"""A time in microseconds since 1970."""
S = 1_000_000
"""Microseconds of a second."""


def test_a_console_returns_the_first_tick_of_its_own_qemu(tmp_path):
    """The log continues that of a previous QEMU, whose ticks do not count, nor does a line that is not complete."""
    path = tmp_path / "console.log"
    path.write_bytes(b"tick 7 0.350\r\ntick 8 0.4")
    console = running.Console(path)
    assert console.first_tick() is None
    with path.open("ab") as file:
        file.write(b"00\r\nother\r\ntick 5 0.2")
        file.flush()
        # The end of an earlier line, and an incomplete line.
        assert console.first_tick() is None
        file.write(b"50\r\ntick 6 0.300\r\n")
    assert console.first_tick() == 5
    later = running.Console(tmp_path / "not-yet")
    assert later.first_tick() is None


def test_new_processes_are_inspected_for_a_while(tmp_path):
    """A process counts as new for 1 s (`INSPECT_NEW_S`); all are inspected every 2 s (`INSPECT_ALL_EVERY_S`)."""

    def execute(pid, *words):
        """Makes process `pid` of the fake /proc execute this command line."""
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "cmdline").write_bytes(b"\0".join(words) + b"\0")

    qemu = (b"qemu", b"-chardev", b"socket,id=console,logfile=/run/x/console.log,logappend=on", b"/run/spy-web.sock")
    execute(1, b"init")
    processes = running.Processes("web", tmp_path)
    assert processes.qemus(10.0) == {}  # at 10 s of the monotonic clock
    execute(2, b"rekindle")
    assert processes.qemus(10.1) == {}
    # Process 2 now executes another program. An old process would be inspected only at intervals.
    execute(2, *qemu)
    assert processes.qemus(10.2) == {2: tmp_path / "2" / "root" / "run/x/console.log"}
    execute(1, *qemu)
    assert list(processes.qemus(11.5)) == []
    assert sorted(processes.qemus(12.5)) == [1, 2]
    assert processes.is_new(2) and not processes.is_new(1)


@pytest.mark.parametrize("new", [True, False])
def test_a_guest_already_running_has_a_first_tick_only_if_its_start_was_seen(tmp_path, new):
    """Its console may have the first tick only if QEMU was found before the guest could run (`new`)."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    qemu = object.__new__(running.Qemu)
    qemu.socket, qemu.buffer, qemu.runs, qemu.new = ours, b"", False, new
    qemu.console = running.Console(tmp_path / "console")
    # QEMU was busy with its load, so the RESUME event was not reported.
    theirs.sendall(b'{"return": {}}\n{"return": {"status": "running", "running": true}}\n')
    assert [runs for runs, _ in qemu.poll()] == [True]
    assert (qemu.console is not None) == new
    ours.close()
    theirs.close()


def test_only_new_lines_of_a_growing_file_are_read(tmp_path):
    """A line without its end waits for it; a replaced, shorter file is read from its start."""
    tail = Tail(tmp_path / "grows")
    assert tail.lines() == []
    tail.path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with tail.path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == ["two", "three"]
    assert tail.lines() == []
    tail.path.write_text("anew\n")
    assert tail.lines() == ["anew"]
    tail.path.unlink()
    assert tail.lines() == []
    (tmp_path / "other").touch()  # so that the number of the old file is not given to the new one
    tail.path.write_text("of another file\nand longer\n")
    assert tail.lines() == ["of another file", "and longer"]
    with tail.path.open("a") as file:
        file.write("skipped\n")
    tail.skip()
    assert tail.lines() == []


def test_the_watch_must_live_and_see_one_qemu(tmp_path):
    """A beat of the watch lists the present QEMUs; it must be younger than the call, here by its fake time."""
    bed = Bed(tmp_path, tmp_path / "bed", {})
    with pytest.raises(BedError, match="has ended"):
        bed.watched()
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        bed.client = bed.watcher = sleeper
        in_a_minute_us = (time.time_ns() // 1000) + 60 * S
        bed.running_file.write_text(json.dumps({"beat": [[7, "n2"]], "host_us": in_a_minute_us}) + "\n")
        assert bed.watched() == (7, "n2")
        with bed.running_file.open("a") as file:
            file.write(json.dumps({"beat": [[7, "n2"], [8, "n3"]], "host_us": in_a_minute_us}) + "\n")
        with pytest.raises(BedError, match="2 QEMUs"):
            bed.watched()
    finally:
        sleeper.kill()
        sleeper.wait()
    with pytest.raises(BedError, match="has ended"):
        bed.watched()


def test_the_counter_is_followed_through_fail_overs():
    """The count reaches 124, and is set back to 110 after a silence; later there is a silence without a loss."""
    before = [Answer(START + n * 20_000, 100 + n // 2) for n in range(50)]
    set_back = [Answer(START + 3 * S + n * 20_000, 110 + n // 2) for n in range(50)]
    after_silence = [Answer(START + 9 * S, 140)]
    first, second = counter.drops(before + set_back + after_silence)
    assert (first.highest, first.after.tick, first.back) == (124, 110, 14)
    assert first.gap_s == pytest.approx(3 - 0.98)  # the last of 50 answers came after 49 * 20 ms
    assert second.back == 0


def test_only_guests_that_run_at_the_same_time_overlap(tmp_path):
    """QEMU 1 pauses and runs until 40; QEMU 2 runs from 39 until now, which is 100."""
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
    """n1 is killed at 0 s, fenced at 1.5 s; n2 runs the guest at 2 s, which answers at 2.1 s.

    The client is without an answer for 2.11 s, since its last one came 10 ms before the kill.
    """
    events = [BedEvent(START / S, "kill n1"), BedEvent(START / S + 1.5, "switch off n1 rc=0")]
    spans = [Span(1, "n1", START - 9 * S, START), Span(2, "n2", START + 2 * S, START + 9 * S)]
    answers = [Answer(START - 10_000, 50), Answer(START + int(2.1 * S), 40)]
    fail_over = timeline.last_fail_over(events, spans, answers)
    assert fail_over.node == "n1"
    assert [round((part.end_us - part.begin_us) / S, 2) for part in fail_over.parts] == [1.5, 0.5, 0.1, 2.11]
    assert "n2 chosen" in timeline.draw(fail_over.parts)
    with pytest.raises(ValueError, match="no node was killed"):
        timeline.last_fail_over([], spans, answers)
