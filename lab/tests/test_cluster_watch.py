"""The watch over the QEMUs of a cluster's VM: which processes are QEMUs, when their guests run, their first ticks.

The guest prints each tick of its counter on its console. When it continues on another node from a checkpoint, the
counter is set back: the first tick that the new QEMU prints shows how far.
"""

import json
import socket
from contextlib import closing

import pytest

from rekindle_lab.cluster import running
from rekindle_lab.cluster.running import INSPECT_ALL_EVERY_S, INSPECT_RECENT_S, Span

FIRST_SEARCH = 10.0
"""Time of the first search for QEMUs, by the monotonic clock in s."""
QEMU = (b"qemu", b"-chardev", b"socket,id=console,logfile=/run/x/console.log,logappend=on", b"/run/spy-web.sock")
"""Command line of a QEMU of the VM `web`."""


@pytest.fixture
def proc(tmp_path):
    """Returns a function that makes a process of a fake /proc execute a command line."""

    def execute(pid, *words):
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "cmdline").write_bytes(b"\0".join(words) + b"\0")

    return execute


def test_a_recent_process_is_inspected_again(proc, tmp_path):
    """A process may execute QEMU some time after its start."""
    processes = running.Processes("web", tmp_path)
    proc(1, b"init")
    assert processes.find_qemus(FIRST_SEARCH) == {}
    proc(2, b"rekindle")
    appeared = FIRST_SEARCH + 0.1
    assert processes.find_qemus(appeared) == {}
    proc(2, *QEMU)
    console_in_node = tmp_path / "2" / "root" / "run/x/console.log"
    assert processes.find_qemus(appeared + INSPECT_RECENT_S / 2) == {2: console_in_node}


def test_an_older_process_is_inspected_only_at_intervals(proc, tmp_path):
    processes = running.Processes("web", tmp_path)
    proc(1, b"init")
    assert processes.find_qemus(FIRST_SEARCH) == {}  # the first search inspects all processes
    proc(1, *QEMU)
    assert processes.find_qemus(FIRST_SEARCH + INSPECT_RECENT_S + 0.1) == {}
    assert list(processes.find_qemus(FIRST_SEARCH + INSPECT_ALL_EVERY_S + 0.1)) == [1]


def test_a_process_was_seen_starting_if_the_first_search_did_not_find_it(proc, tmp_path):
    processes = running.Processes("web", tmp_path)
    proc(1, *QEMU)
    processes.find_qemus(FIRST_SEARCH)
    proc(2, *QEMU)
    processes.find_qemus(FIRST_SEARCH + 0.1)
    assert not processes.was_seen_starting(1)
    assert processes.was_seen_starting(2)


def test_a_console_returns_the_first_tick_of_its_own_qemu(tmp_path):
    """The log continues that of a previous QEMU, whose ticks do not count, nor does a line that is not complete."""
    path = tmp_path / "console.log"
    path.write_bytes(b"tick 7 0.350\r\ntick 8 0.4")
    console = running.Console(path)
    assert console.first_tick() is None
    end_of_previous_line, incomplete_line = b"00\r\nother\r\n", b"tick 5 0.2"
    with path.open("ab") as file:
        file.write(end_of_previous_line + incomplete_line)
    assert console.first_tick() is None
    with path.open("ab") as file:
        file.write(b"50\r\ntick 6 0.300\r\n")
    assert console.first_tick() == 5


def test_a_console_without_a_file_has_no_tick(tmp_path):
    assert running.Console(tmp_path / "not-yet").first_tick() is None


@pytest.mark.parametrize("was_seen_starting", [True, False])
def test_a_guest_that_already_runs_has_a_first_tick_only_if_its_start_was_seen(tmp_path, was_seen_starting):
    """Otherwise its first tick may have passed before the watch opened the console."""
    ours, of_qemu = socket.socketpair()
    ours.setblocking(False)
    with closing(ours), closing(of_qemu):
        console = running.Console(tmp_path / "console")
        qemu = running.Qemu(1, "n1", ours, console, was_seen_starting=was_seen_starting)
        # The answers to the two commands of `Qemu.connect`. QEMU was busy with its load: it reported no RESUME event.
        of_qemu.sendall(b'{"return": {}}\n{"return": {"status": "running", "running": true}}\n')
        assert [change.runs for change in qemu.poll()] == [True]
        assert (qemu.console is not None) == was_seen_starting


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
    before_pause, after_pause, of_second = Span(1, "n1", 10, 20), Span(1, "n1", 21, 40), Span(2, "n2", 39, 100)
    spans = running.read(path, 100)
    assert spans == [before_pause, after_pause, of_second]
    assert running.overlaps(spans) == [(after_pause, of_second)]
    assert not running.overlaps([before_pause, after_pause])
