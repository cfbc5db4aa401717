"""Records which QEMU runs a VM's guest, and when, over all nodes of the test bed, from their QMP sockets.

    python3 running.py VM OUT     watch until ended

The watch writes JSON lines: one each time a guest starts or stops running ({"pid", "node", "runs", "host_us"}); one for
the first tick of a guest's counter in each QEMU ({"pid", "node", "tick", "host_us"}), from which a restored guest
continues; and, twice a second, one with the present QEMUs ({"beat": [[pid, node], ...], "host_us"}).

The watch finds a QEMU of the VM by its arguments, among the processes of the whole machine, and reaches it through the
root of its node. A frozen QEMU counts as running, since it might continue.
Needs only Python itself, and little processor time, since it runs during measurements.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.05
"""Seconds between searches for a new QEMU, and for its first tick. An event of a QEMU wakes the watch immediately."""
YOUNG_S = 1.0
"""Seconds for which a new process is inspected, since it may execute another program."""
ALL_S = 2.0
"""Seconds between inspections of all processes."""
BEAT_S = 0.5
TICK = re.compile(rb"^tick (\d+) \d+\.\d+$")


@dataclass(frozen=True)
class Span:
    """A QEMU, and when its guest ran, in microseconds since 1970."""

    pid: int
    node: str
    begin_us: int
    end_us: int


def overlaps(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Finds pairs of QEMUs whose guests ran at the same time.

    >>> overlaps([Span(1, "a", 0, 10), Span(2, "b", 10, 20), Span(3, "c", 15, 30)])
    [(Span(pid=2, node='b', begin_us=10, end_us=20), Span(pid=3, node='c', begin_us=15, end_us=30))]
    """
    ordered = sorted(spans, key=lambda span: span.begin_us)
    return [
        (one, other)
        for index, one in enumerate(ordered)
        for other in ordered[index + 1 :]
        if other.pid != one.pid and other.begin_us < one.end_us
    ]


def read(path: Path, now_us: int) -> list[Span]:
    """Reads the spans from a file; a span without an end lasts until `now_us`."""
    return spans(map(json.loads, path.read_text().splitlines()), now_us)


def spans(events: Iterable[dict[str, Any]], now_us: int) -> list[Span]:
    """Returns the spans in a watch's events; a span without an end lasts until `now_us`."""
    began: dict[int, tuple[str, int]] = {}
    found = []
    for event in events:
        if "runs" not in event:
            continue
        pid, node, host_us = event["pid"], event["node"], event["host_us"]
        if event["runs"]:
            began.setdefault(pid, (node, host_us))
        elif pid in began:
            found.append(Span(pid, node, began.pop(pid)[1], host_us))
    return found + [Span(pid, node, begin, now_us) for pid, (node, begin) in began.items()]


@dataclass(frozen=True)
class GuestStart:
    """A guest's start in a QEMU: when, and the first tick of the guest's counter in it, if that was seen."""

    pid: int
    node: str
    begin_us: int
    tick: int | None


def starts(events: Iterable[dict[str, Any]]) -> list[GuestStart]:
    """Returns the guest's start in each QEMU in a watch's events, in the order of the starts."""
    began: dict[int, tuple[str, int]] = {}
    ticks: dict[int, int] = {}
    for event in events:
        if event.get("runs"):
            began.setdefault(event["pid"], (event["node"], event["host_us"]))
        elif "tick" in event:
            ticks.setdefault(event["pid"], event["tick"])
    found = [GuestStart(pid, node, begin, ticks.get(pid)) for pid, (node, begin) in began.items()]
    return sorted(found, key=lambda start: start.begin_us)


class Console:
    """A guest's console, as one QEMU writes it: skips earlier output, which is of another QEMU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0
        self.rest = b""

    def first_tick(self) -> int | None:
        """Returns the first complete tick. A line that another QEMU has started does not match."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.at)
            text = file.read()
            self.at += len(text)
            *lines, self.rest = (self.rest + text).split(b"\n")
            for line in lines:
                found = TICK.match(line.strip())
                if found:
                    return int(found[1])
        return None


class Qemu:
    """One QEMU of the VM, and a connection to a QMP socket that only the watch uses."""

    def __init__(self, pid: int, vm: str, console: Console | None, *, new: bool) -> None:
        """Connects; raises `OSError` while QEMU does not listen. `new`: QEMU was seen before its guest could run."""
        self.pid = pid
        self.new = new
        self.node = _node(pid)
        self.console = console
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(1.0)
        self.socket.connect(f"/proc/{pid}/root/run/spy-{vm}.sock")
        self.buffer = b""
        self.runs = False
        for command in ("qmp_capabilities", "query-status"):
            self.socket.sendall(json.dumps({"execute": command}).encode() + b"\n")
        self.socket.settimeout(0.0)

    def poll(self) -> list[tuple[bool, int]]:
        """Returns new events: whether the guest runs, and since when. Raises `ConnectionError` if QEMU has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = self.socket.recv(65536)
                if not part:
                    raise ConnectionError("ended")
                self.buffer += part
        *lines, self.buffer = self.buffer.split(b"\n")
        changes = []
        for message in map(json.loads, lines):
            runs, host_us = None, time.time_ns() // 1000
            answer = message.get("return")
            if isinstance(answer, dict) and "running" in answer:
                runs = answer["running"]
                if runs and not self.new:
                    self.console = None  # the guest started at an unknown time, and its first tick has passed
            elif message.get("event") in ("RESUME", "STOP"):
                runs = message["event"] == "RESUME"
                stamp = message["timestamp"]
                host_us = stamp["seconds"] * 1_000_000 + stamp["microseconds"]
            if runs is not None and runs != self.runs:
                self.runs = runs
                changes.append((runs, host_us))
        return changes


def _node(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/root/run/node").read_text().strip()
    except OSError:
        return "?"


@dataclass
class Processes:
    """The processes of a machine, and which of them are QEMUs of the VM on any node."""

    vm: str
    machine: Path = Path("/proc")
    _seen: dict[str, float] = field(default_factory=dict)
    """When each process was first seen."""
    _all: float = 0.0
    _first_call: float | None = None

    def is_new(self, pid: int) -> bool:
        """Returns whether a process has started since the first call of `qemus`."""
        return self._first_call is not None and self._seen.get(str(pid), self._first_call) > self._first_call

    def qemus(self, now: float) -> dict[int, Path | None]:
        """Returns the QEMUs among new processes, with their guests' console files. `now`: by the monotonic clock."""
        wanted = f"/run/spy-{self.vm}.sock".encode()
        self._first_call = now if self._first_call is None else self._first_call
        everything = now - self._all > ALL_S
        if everything:
            self._all = now
        names = [name for name in os.listdir(self.machine) if name.isdigit()]  # noqa: PTH208
        self._seen = {name: self._seen.get(name, now) for name in names}
        found: dict[int, Path | None] = {}
        for name, since in self._seen.items():
            if not everything and now - since > YOUNG_S:
                continue
            with contextlib.suppress(OSError):
                line = (self.machine / name / "cmdline").read_bytes()
                if wanted in line:
                    log = re.search(rb"logfile=([^,\0]+)", line)
                    root = self.machine / name / "root"
                    found[int(name)] = root / log[1].decode().lstrip("/") if log else None
        return found


def watch(vm: str, out: Path) -> None:
    """Watches the QEMUs of a VM until this process is ended; appends to `out`."""
    known: dict[int, Qemu] = {}
    consoles: dict[int, Console | None] = {}
    processes = Processes(vm)
    searched = reported = 0.0
    with out.open("a", buffering=1) as file:

        def note(qemu: Qemu, host_us: int, **what: Any) -> None:  # noqa: ANN401
            file.write(json.dumps({"pid": qemu.pid, "node": qemu.node, **what, "host_us": host_us}) + "\n")

        while True:
            now = time.monotonic()
            if now - searched >= POLL_S:
                searched = now
                for pid, log in processes.qemus(now).items():
                    consoles.setdefault(pid, Console(log) if log else None)
                for pid in [pid for pid in consoles if pid not in known]:
                    try:
                        known[pid] = Qemu(pid, vm, consoles[pid], new=processes.is_new(pid))
                    except OSError:
                        if not Path(f"/proc/{pid}").exists():
                            del consoles[pid]
                for qemu in known.values():
                    if qemu.console and qemu.runs and (tick := qemu.console.first_tick()) is not None:
                        qemu.console = None
                        note(qemu, time.time_ns() // 1000, tick=tick)
            if now - reported >= BEAT_S:
                reported = now
                beat = [[qemu.pid, qemu.node] for qemu in known.values()]
                file.write(json.dumps({"beat": beat, "host_us": time.time_ns() // 1000}) + "\n")
            ready, _, _ = select.select([qemu.socket for qemu in known.values()], [], [], POLL_S)
            for pid, qemu in [pair for pair in known.items() if pair[1].socket in ready]:
                try:
                    for runs, host_us in qemu.poll():
                        note(qemu, host_us, runs=runs)
                except OSError:
                    if qemu.runs:
                        note(qemu, time.time_ns() // 1000, runs=False)
                    qemu.socket.close()
                    del known[pid], consoles[pid]


def main() -> None:
    """Watches with the arguments of the command line."""
    vm, out = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watch(vm, Path(out))


if __name__ == "__main__":
    main()
