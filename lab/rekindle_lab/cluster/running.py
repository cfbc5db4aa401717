"""Which QEMU runs a VM's guest, and when, over all nodes of the test bed: as their own QMP sockets tell it.

    python3 running.py VM OUT     watch until it is ended; a JSON line each time a guest begins or ends to run

A QEMU of the VM is found by its arguments, among the processes of the whole machine, and reached through its node's
own root. One that is frozen counts as one that runs: it might go on.
"""

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.01


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
    began: dict[int, tuple[str, int]] = {}
    spans = []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        pid, node, host_us = event["pid"], event["node"], event["host_us"]
        if event["runs"]:
            began.setdefault(pid, (node, host_us))
        elif pid in began:
            spans.append(Span(pid, node, began.pop(pid)[1], host_us))
    return spans + [Span(pid, node, begin, now_us) for pid, (node, begin) in began.items()]


class Qemu:
    """One QEMU of the VM, through a socket that nobody else uses."""

    def __init__(self, pid: int, vm: str) -> None:
        """Connect; raises `OSError` while it does not listen yet."""
        self.pid = pid
        self.node = _node(pid)
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


def qemus(vm: str, machine: Path = Path("/proc")) -> list[int]:
    """The processes that are QEMUs of the VM on any node."""
    wanted = f"/run/spy-{vm}.sock".encode()
    found = []
    for process in machine.iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
    return found


def watch(vm: str, out: Path) -> None:
    """Watch until ended."""
    known: dict[int, Qemu] = {}
    looked = 0.0
    with out.open("a", buffering=1) as file:

        def note(qemu: Qemu, runs: bool, host_us: int) -> None:
            event = {"pid": qemu.pid, "node": qemu.node, "runs": runs, "host_us": host_us}
            file.write(json.dumps(event) + "\n")

        while True:
            if time.monotonic() - looked > LOOK_S * 5:
                looked = time.monotonic()
                for pid in qemus(vm):
                    if pid not in known:
                        with contextlib.suppress(OSError):
                            known[pid] = Qemu(pid, vm)
            for pid, qemu in list(known.items()):
                try:
                    for runs, host_us in qemu.look():
                        note(qemu, runs, host_us)
                except OSError:
                    if qemu.runs:
                        note(qemu, False, time.time_ns() // 1000)
                    qemu.socket.close()
                    del known[pid]
            time.sleep(LOOK_S)


def main() -> None:
    """As the command line says."""
    vm, out = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watch(vm, Path(out))


if __name__ == "__main__":
    main()
