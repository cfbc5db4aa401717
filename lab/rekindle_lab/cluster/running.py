"""Which QEMU runs a VM's guest, and when, over all nodes of the test bed: as their own QMP sockets tell it.

    python3 running.py VM OUT     watch until it is ended

It writes a JSON line each time a guest begins or ends to run ({"pid", "node", "runs", "host_us"}); one for the first
tick of a guest's counter in each QEMU ({"pid", "node", "tick", "host_us"}), which is what a restored guest goes on
with; and, twice a second, one with the QEMUs that there are ({"beat": [[pid, node], ...], "host_us"}).

A QEMU of the VM is found by its arguments, among the processes of the whole machine, and reached through its node's
own root. One that is frozen counts as one that runs: it might go on.
Needs nothing but Python itself, and little of a processor: what it watches is measured beside it.
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

LOOK_S = 0.05
"""For a new QEMU, and for its first tick. What a QEMU says wakes the watch at once."""
YOUNG_S = 1.0
"""A process is looked at for so long: it may yet become another program."""
ALL_S = 2.0
"""All processes are looked at so often."""
BEAT_S = 0.5
TICK = re.compile(rb"^tick (\d+) \d+\.\d+$")


@dataclass(frozen=True)
class Span:
    """A QEMU, and from when to when its guest ran, in microseconds since 1970."""

    pid: int
    node: str
    begin_us: int
    end_us: int


def overlaps(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Two QEMUs whose guests ran at once.

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
    """The spans of a file; one that has no end ran until `now_us`."""
    return spans(map(json.loads, path.read_text().splitlines()), now_us)


def spans(events: Iterable[dict[str, Any]], now_us: int) -> list[Span]:
    """The spans that a watch has told of; one that has no end ran until `now_us`."""
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
class Start:
    """A guest's beginning in a QEMU: when, and the first tick of its counter there, where that was seen."""

    pid: int
    node: str
    begin_us: int
    tick: int | None


def starts(events: Iterable[dict[str, Any]]) -> list[Start]:
    """Each QEMU that a watch has told of, by when its guest began to run in it."""
    began: dict[int, tuple[str, int]] = {}
    ticks: dict[int, int] = {}
    for event in events:
        if event.get("runs"):
            began.setdefault(event["pid"], (event["node"], event["host_us"]))
        elif "tick" in event:
            ticks.setdefault(event["pid"], event["tick"])
    found = [Start(pid, node, begin, ticks.get(pid)) for pid, (node, begin) in began.items()]
    return sorted(found, key=lambda start: start.begin_us)


class Console:
    """A guest's console, as one QEMU writes it: what was there before, of another QEMU, is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = path.stat().st_size if path.exists() else 0
        self.rest = b""

    def first_tick(self) -> int | None:
        """The first whole tick since. A line that another QEMU has begun does not look like one."""
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
    """One QEMU of the VM, through a socket that nobody else uses."""

    def __init__(self, pid: int, vm: str, console: Console | None, *, new: bool) -> None:
        """Connect; raises `OSError` while it does not listen yet. `new`: it was seen before its guest could run."""
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

    def look(self) -> list[tuple[bool, int]]:
        """What it has said: whether the guest runs, from when on. Raises `ConnectionError` when it has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                part = self.socket.recv(65536)
                if not part:
                    raise ConnectionError("ended")
                self.buffer += part
        *lines, self.buffer = self.buffer.split(b"\n")
        told = []
        for message in map(json.loads, lines):
            runs, host_us = None, time.time_ns() // 1000
            answer = message.get("return")
            if isinstance(answer, dict) and "running" in answer:
                runs = answer["running"]
                if runs and not self.new:
                    self.console = None  # for how long already is not known, nor what its first tick was
            elif message.get("event") in ("RESUME", "STOP"):
                runs = message["event"] == "RESUME"
                stamp = message["timestamp"]
                host_us = stamp["seconds"] * 1_000_000 + stamp["microseconds"]
            if runs is not None and runs != self.runs:
                self.runs = runs
                told.append((runs, host_us))
        return told


def _node(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/root/run/node").read_text().strip()
    except OSError:
        return "?"


@dataclass
class Processes:
    """The processes of a machine: which of them are QEMUs of the VM on any node."""

    vm: str
    machine: Path = Path("/proc")
    _seen: dict[str, float] = field(default_factory=dict)
    """Since when a process is known."""
    _all: float = 0.0
    _begun: float | None = None

    def is_new(self, pid: int) -> bool:
        """Whether it has begun since the first look."""
        return self._begun is not None and self._seen.get(str(pid), self._begun) > self._begun

    def qemus(self, now: float) -> dict[int, Path | None]:
        """Those found among what is new, by the monotonic clock, and where their guest's console goes."""
        wanted = f"/run/spy-{self.vm}.sock".encode()
        self._begun = now if self._begun is None else self._begun
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
    """Watch until ended."""
    known: dict[int, Qemu] = {}
    consoles: dict[int, Console | None] = {}
    processes = Processes(vm)
    looked = told = 0.0
    with out.open("a", buffering=1) as file:

        def note(qemu: Qemu, host_us: int, **what: Any) -> None:  # noqa: ANN401
            file.write(json.dumps({"pid": qemu.pid, "node": qemu.node, **what, "host_us": host_us}) + "\n")

        while True:
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
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
            if now - told >= BEAT_S:
                told = now
                beat = [[qemu.pid, qemu.node] for qemu in known.values()]
                file.write(json.dumps({"beat": beat, "host_us": time.time_ns() // 1000}) + "\n")
            ready, _, _ = select.select([qemu.socket for qemu in known.values()], [], [], LOOK_S)
            for pid, qemu in [pair for pair in known.items() if pair[1].socket in ready]:
                try:
                    for runs, host_us in qemu.look():
                        note(qemu, host_us, runs=runs)
                except OSError:
                    if qemu.runs:
                        note(qemu, time.time_ns() // 1000, runs=False)
                    qemu.socket.close()
                    del known[pid], consoles[pid]


def main() -> None:
    """As the command line says."""
    vm, out = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watch(vm, Path(out))


if __name__ == "__main__":
    main()
