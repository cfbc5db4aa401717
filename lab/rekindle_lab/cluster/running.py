"""Records which QEMU runs a VM's guest, and when, over all nodes of the test bed, from their QMP sockets.

    python3 running.py VM OUT     watch until ended

The watch writes JSON lines: one each time a guest starts or stops running ({"pid", "node", "runs", "host_us"}); one for
the first tick of a guest's counter in each QEMU ({"pid", "node", "tick", "host_us"}), from which a restored guest
continues; and, twice a second, one with the present QEMUs ({"beat": [[pid, node], ...], "host_us"}).

`Watch` is the recorder; `spans`, `overlaps` and `starts` read its records. The watch finds a QEMU of the VM by its
arguments, among the processes of the whole machine, and reaches it through the root of its node. A frozen QEMU counts
as running, since it might continue. Needs only Python itself, and little processor time, since it runs during
measurements.
"""

import contextlib
import json
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, Self, TextIO

POLL_S = 0.05
"""Seconds between searches for a new QEMU, and for its first tick. An event of a QEMU wakes the watch immediately."""
INSPECT_RECENT_S = 1.0
"""Seconds for which each search inspects a process after it was first seen, since it may execute another program."""
INSPECT_ALL_EVERY_S = 2.0
"""Seconds between searches that inspect all processes."""
BEAT_EVERY_S = 0.5
"""Seconds between two lines with the present QEMUs, which show that the watch is alive."""
TICK = re.compile(rb"^tick (\d+) \d+\.\d+$")
"""A line of the guest's console: the count, and the guest's time in seconds."""


@dataclass(frozen=True)
class Span:
    """A QEMU, and when its guest ran, in microseconds since 1970."""

    pid: int
    node: str
    begin_us: int
    end_us: int


class Overlap(NamedTuple):
    """Two spans of which the second begins before the first ends."""

    span: Span
    later: Span


def overlaps(spans: Iterable[Span]) -> list[Overlap]:
    """Finds pairs of QEMUs whose guests ran at the same time.

    >>> [(overlap.span.pid, overlap.later.pid) for overlap in overlaps([Span(1, "a", 0, 10), Span(2, "b", 9, 20)])]
    [(1, 2)]
    """
    pairs = combinations(sorted(spans, key=lambda span: span.begin_us), 2)
    return [Overlap(span, later) for span, later in pairs if later.pid != span.pid and later.begin_us < span.end_us]


def read(path: Path, now_us: int) -> list[Span]:
    """Reads the spans from a file; a span without an end lasts until `now_us`."""
    return spans(map(json.loads, path.read_text().splitlines()), now_us)


def spans(events: Iterable[dict[str, Any]], now_us: int) -> list[Span]:
    """Returns the spans in a watch's events; a span without an end lasts until `now_us`."""
    open_spans: dict[int, Span] = {}
    """By pid; each lasts until `now_us` so far."""
    ended = []
    for event in events:
        if "runs" not in event:
            continue
        pid, host_us = event["pid"], event["host_us"]
        if event["runs"]:
            open_spans.setdefault(pid, Span(pid, event["node"], host_us, now_us))
        elif pid in open_spans:
            ended.append(replace(open_spans.pop(pid), node=event["node"], end_us=host_us))
    return [*ended, *open_spans.values()]


@dataclass(frozen=True)
class GuestStart:
    """A guest's start in a QEMU: when, and the first tick of the guest's counter in it, if that was seen."""

    pid: int
    node: str
    begin_us: int
    tick: int | None


def starts(events: Iterable[dict[str, Any]]) -> list[GuestStart]:
    """Returns the guest's start in each QEMU in a watch's events, in the order of the starts."""
    first_runs: dict[int, GuestStart] = {}
    first_ticks: dict[int, int] = {}
    for event in events:
        pid = event.get("pid")
        if event.get("runs"):
            first_runs.setdefault(pid, GuestStart(pid, event["node"], event["host_us"], None))
        elif "tick" in event:
            first_ticks.setdefault(pid, event["tick"])
    with_ticks = [replace(start, tick=first_ticks.get(pid)) for pid, start in first_runs.items()]
    return sorted(with_ticks, key=lambda start: start.begin_us)


class Console:
    """A guest's console, as one QEMU writes it: skips earlier output, which is of another QEMU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.incomplete_line = b""

    def first_tick(self) -> int | None:
        """Returns the first complete tick. A line that another QEMU has started does not match."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
            self.offset += len(text)
            *lines, self.incomplete_line = (self.incomplete_line + text).split(b"\n")
            for line in lines:
                tick = TICK.match(line.strip())
                if tick:
                    return int(tick[1])
        return None


class RunChange(NamedTuple):
    """The guest of a QEMU starts or stops running, at a time in microseconds since 1970."""

    runs: bool
    host_us: int


class Qemu:
    """One QEMU of the VM, and a connection to a QMP socket that only the watch uses."""

    def __init__(
        self, pid: int, node: str, connection: socket.socket, console: Console | None, *, was_seen_starting: bool
    ) -> None:
        """`was_seen_starting`: QEMU was found before its guest could run."""
        self.pid = pid
        self.node = node
        self.socket = connection
        self.console = console
        """`None` once the guest's first tick was found, or if it cannot be found."""
        self.was_seen_starting = was_seen_starting
        self.buffer = b""
        """The start of a message that is not complete."""
        self.runs = False

    @classmethod
    def connect(cls, pid: int, vm: str, console: Console | None, *, was_seen_starting: bool) -> Self:
        """Connects, and requests the guest's state. Raises `OSError` while QEMU does not listen."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(1.0)
        connection.connect(f"/proc/{pid}/root/run/spy-{vm}.sock")
        for command in ("qmp_capabilities", "query-status"):
            connection.sendall(json.dumps({"execute": command}).encode() + b"\n")
        connection.settimeout(0.0)
        return cls(pid, _node(pid), connection, console, was_seen_starting=was_seen_starting)

    def poll(self) -> list[RunChange]:
        """Returns the changes since the last call. Raises `ConnectionError` if QEMU has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = self.socket.recv(65536)
                if not part:
                    raise ConnectionError("ended")
                self.buffer += part
        *lines, self.buffer = self.buffer.split(b"\n")
        changes = []
        for message in map(json.loads, lines):
            change = self._change_in(message)
            if change is not None and change.runs != self.runs:
                self.runs = change.runs
                changes.append(change)
        return changes

    def _change_in(self, message: dict[str, Any]) -> RunChange | None:
        """Returns the state of the guest that a message reports."""
        answer = message.get("return")
        if isinstance(answer, dict) and "running" in answer:
            if answer["running"] and not self.was_seen_starting:
                self.console = None  # the guest started at an unknown time, and its first tick has passed
            return RunChange(answer["running"], time.time_ns() // 1000)
        if message.get("event") in ("RESUME", "STOP"):
            stamp = message["timestamp"]
            return RunChange(message["event"] == "RESUME", stamp["seconds"] * 1_000_000 + stamp["microseconds"])
        return None


def _node(pid: int) -> str:
    """Returns the node in which a process runs, `?` if the process has ended."""
    try:
        return Path(f"/proc/{pid}/root/run/node").read_text().strip()
    except OSError:
        return "?"


@dataclass
class Processes:
    """The processes of a machine, and which of them are QEMUs of the VM on any node."""

    vm: str
    machine: Path = Path("/proc")
    _first_seen: dict[str, float] = field(default_factory=dict)
    """When each process was first seen, by its pid. Times are of the monotonic clock, in s."""
    _last_inspection_of_all: float = 0.0
    _first_search: float | None = None

    def was_seen_starting(self, pid: int) -> bool:
        """Returns whether a process has started since the first call of `find_qemus`."""
        if self._first_search is None or str(pid) not in self._first_seen:
            return False
        return self._first_seen[str(pid)] > self._first_search

    def find_qemus(self, now: float) -> dict[int, Path | None]:
        """Returns the VM's QEMUs among the inspected processes, with their guests' console files.

        Inspects the processes that were first seen recently, at intervals all of them. `now`: by the monotonic clock.
        """
        if self._first_search is None:
            self._first_search = now
        inspects_all = now - self._last_inspection_of_all > INSPECT_ALL_EVERY_S
        if inspects_all:
            self._last_inspection_of_all = now
        pids = [name for name in os.listdir(self.machine) if name.isdigit()]  # noqa: PTH208
        self._first_seen = {pid: self._first_seen.get(pid, now) for pid in pids}
        console_by_pid: dict[int, Path | None] = {}
        for pid, first_seen in self._first_seen.items():
            if inspects_all or now - first_seen <= INSPECT_RECENT_S:
                self._inspect(pid, console_by_pid)
        return console_by_pid

    def _inspect(self, pid: str, console_by_pid: dict[int, Path | None]) -> None:
        """Adds a process to `console_by_pid` if it is a QEMU of the VM. Ignores a process that has ended."""
        with contextlib.suppress(OSError):
            command_line = (self.machine / pid / "cmdline").read_bytes()
            if f"/run/spy-{self.vm}.sock".encode() in command_line:
                log = re.search(rb"logfile=([^,\0]+)", command_line)
                root = self.machine / pid / "root"
                console_by_pid[int(pid)] = root / log[1].decode().lstrip("/") if log else None


class Watch:
    """The watch over the QEMUs of a VM, which writes its events to a file."""

    def __init__(self, vm: str, file: TextIO) -> None:
        self.vm = vm
        self.file = file
        self.processes = Processes(vm)
        self.consoles: dict[int, Console | None] = {}
        """Of each QEMU by its pid, also of one that does not listen yet."""
        self.qemus: dict[int, Qemu] = {}
        """The QEMUs that are connected, by pid."""

    def run(self) -> None:
        """Watches until this process is ended."""
        last_search = last_beat = 0.0
        while True:
            now = time.monotonic()
            if now - last_search >= POLL_S:
                last_search = now
                self.find_qemus(now)
                self.read_first_ticks()
            if now - last_beat >= BEAT_EVERY_S:
                last_beat = now
                self.write({"beat": [[qemu.pid, qemu.node] for qemu in self.qemus.values()]})
            ready, _, _ = select.select([qemu.socket for qemu in self.qemus.values()], [], [], POLL_S)
            for qemu in [qemu for qemu in self.qemus.values() if qemu.socket in ready]:
                self.read_changes(qemu)

    def find_qemus(self, now: float) -> None:
        """Finds new QEMUs, and connects to those that listen."""
        for pid, log in self.processes.find_qemus(now).items():
            self.consoles.setdefault(pid, Console(log) if log else None)
        for pid in [pid for pid in self.consoles if pid not in self.qemus]:
            try:
                was_seen_starting = self.processes.was_seen_starting(pid)
                self.qemus[pid] = Qemu.connect(pid, self.vm, self.consoles[pid], was_seen_starting=was_seen_starting)
            except OSError:
                if not Path(f"/proc/{pid}").exists():
                    del self.consoles[pid]

    def read_first_ticks(self) -> None:
        """Reports the first tick of each guest that runs, once its console has it."""
        for qemu in self.qemus.values():
            if qemu.console and qemu.runs and (tick := qemu.console.first_tick()) is not None:
                qemu.console = None
                self.write({"pid": qemu.pid, "node": qemu.node, "tick": tick})

    def read_changes(self, qemu: Qemu) -> None:
        """Reports the changes of a QEMU; forgets it if it has ended."""
        try:
            for change in qemu.poll():
                self.write({"pid": qemu.pid, "node": qemu.node, "runs": change.runs}, change.host_us)
        except OSError:
            if qemu.runs:
                self.write({"pid": qemu.pid, "node": qemu.node, "runs": False})
            qemu.socket.close()
            del self.qemus[qemu.pid], self.consoles[qemu.pid]

    def write(self, event: dict[str, Any], host_us: int | None = None) -> None:
        """Writes an event with its time, which is now by default."""
        event["host_us"] = time.time_ns() // 1000 if host_us is None else host_us
        self.file.write(json.dumps(event) + "\n")


def main() -> None:
    """Watches with the arguments of the command line."""
    vm, out = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Path(out).open("a", buffering=1) as file:
        Watch(vm, file).run()


if __name__ == "__main__":
    main()
