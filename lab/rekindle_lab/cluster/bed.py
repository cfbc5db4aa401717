"""Drives `tests/cluster/bed`: starts it, injects faults, watches; removes everything at the end (`bed`, `Bed`).

The bed has three nodes of a Pacemaker cluster (namespaces of this machine), a store of checkpoints and a power switch,
which fences nodes: it ends a node that does not answer, and reports so. One VM runs on a node, protected by
checkpoints. A client requests the guest's counter (`counter`), and a watch records which QEMU runs the guest
(`running`).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rekindle_lab.tail import Tail

from . import counter, running
from .events import BedEvent, read_events

T = TypeVar("T")
DEADLINE_S = 120.0
NODES = ("n1", "n2", "n3")
VM = "web"
"""Name of the VM."""
ADDRESS = "10.99.0.50"
"""Address of the guest, as `tests/cluster/bed` sets it."""
ANSWERS_BEFORE_QUERIES = 10
"""Number of answers of the guest before Pacemaker is queried."""
COUNTER_EVERY_MS = 20
"""Milliseconds between two requests of the client."""
PACEMAKER_POLL_S = 0.25
"""Seconds between queries to Pacemaker, each of which starts processes."""
BEAT_DEADLINE_S = 10.0
"""Deadline for a beat of the watch, of which there are two a second."""


class BedError(Exception):
    """A condition was not met in time, or `tests/cluster/bed` failed."""


def wait_for(what: str, query: Callable[[], T | None], deadline_s: float = DEADLINE_S, every_s: float = 0.02) -> T:
    """Polls `query` until it returns neither `None` nor `False`; raises `BedError` at the deadline."""
    deadline = time.monotonic() + deadline_s
    while True:
        result = query()
        if result is not None and result is not False:
            return result
        if time.monotonic() > deadline:
            raise BedError(f"{what}: not within {deadline_s:g} s")
        time.sleep(every_s)


class WatchedQemu(NamedTuple):
    """A QEMU of the VM, and the node in which it runs."""

    pid: int
    node: str


@dataclass
class Bed:
    """A running test bed."""

    root: Path
    """Folder of the project."""
    folder: Path
    """Folder of the test bed."""
    environment: dict[str, str]
    client: subprocess.Popen[bytes] | None = None
    watcher: subprocess.Popen[bytes] | None = None
    _answers: list[counter.Answer] = field(default_factory=list)
    _watch_events: list[dict[str, Any]] = field(default_factory=list)
    _node: str | None = None
    """Node in which the guest last began to run."""
    _checkpoints: list[dict[str, Any]] = field(default_factory=list)
    _tails: dict[str, Tail] = field(default_factory=dict)
    """The files that are read as they grow, by name."""

    @property
    def counter_file(self) -> Path:
        """File to which the client writes its answers."""
        return self.folder.parent / "counter.jsonl"

    @property
    def running_file(self) -> Path:
        """File to which the watch over the QEMUs writes its events."""
        return self.folder.parent / "running.jsonl"

    def call(self, *words: str, check: bool = True) -> str:
        """Runs `tests/cluster/bed WORDS`."""
        completed = subprocess.run(
            [self.root / "tests/cluster/bed", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and completed.returncode:
            raise BedError(
                f"tests/cluster/bed {' '.join(words)}: exit status {completed.returncode}: {completed.stderr.strip()}"
            )
        return completed.stdout.strip()

    def start_client(self, patience_s: float = counter.PATIENCE) -> None:
        """Starts a client that waits `patience_s` for an answer; replaces a running client."""
        self.stop_client()
        in_client_network = [str(self.root / "tests/cluster/bed"), "client"]
        program = [sys.executable, str(Path(__file__).parent / "counter.py")]
        command = [
            *in_client_network,
            *program,
            ADDRESS,
            str(self.counter_file),
            str(COUNTER_EVERY_MS),
            str(patience_s),
        ]
        self.client = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL)

    def stop_client(self) -> None:
        """Ends the client."""
        if self.client is not None:
            self.client.terminate()
            self.client.wait()
            self.client = None

    def vm_node(self) -> str | None:
        """Returns the node on which Pacemaker runs the VM."""
        return self.call("where", VM, check=False) or None

    def pid(self, node: str) -> int | None:
        """Returns a node's PID 1; `None` if the node is off."""
        path = self.folder / f"pid.{node}"
        return int(path.read_text()) if path.exists() else None

    def events(self) -> list[BedEvent]:
        """Returns the faults of nodes and store, and the actions of the power switch."""
        return read_events(self.folder)

    def fenced_us(self, node: str, since_us: int) -> int | None:
        """Returns when the power switch had ended a node since `since_us`; both in microseconds since 1970."""
        switched_off = f"switch off {node} rc=0"
        fencings = (event for event in self.events() if event.text == switched_off and event.s * 1e6 >= since_us)
        return next((int(event.s * 1e6) for event in fencings), None)

    def _new_lines(self, name: str, path: Path) -> list[str]:
        """Returns the new lines of a file; all lines if `path` is not that of the last call with this name."""
        tail = self._tails.get(name)
        if tail is None or tail.path != path:
            tail = self._tails[name] = Tail(path)
        return tail.lines()

    def answers(self) -> list[counter.Answer]:
        """Returns all answers to the client so far. The list is always the same object, and grows."""
        lines = self._new_lines("answers", self.counter_file)
        self._answers += [counter.Answer(**json.loads(line)) for line in lines]
        return self._answers

    def watch_events(self) -> list[dict[str, Any]]:
        """Returns all events of the watch over the QEMUs so far. The list is always the same object, and grows."""
        for line in self._new_lines("running", self.running_file):
            event = json.loads(line)
            self._watch_events.append(event)
            if event.get("runs"):
                self._node = event["node"]
        return self._watch_events

    def spans(self) -> list[running.Span]:
        """Returns the spans of time in which a guest ran."""
        return running.spans(self.watch_events(), time.time_ns() // 1000)

    def watched(self) -> WatchedQemu:
        """Returns the only QEMU, from a watch event after this call.

        Raises `BedError` if the watch or the client has ended, or if there is not exactly one QEMU.
        """
        for name, process in (("the watch over the QEMUs", self.watcher), ("the client", self.client)):
            if process is None or process.poll() is not None:
                raise BedError(f"{name} has ended")
        called_us = time.time_ns() // 1000

        def qemus_in_new_beat() -> list[WatchedQemu] | None:
            last_beat = next((event for event in reversed(self.watch_events()) if "beat" in event), None)
            if last_beat is None or last_beat["host_us"] <= called_us:
                return None
            return [WatchedQemu(pid, node) for pid, node in last_beat["beat"]]

        qemus = wait_for("the watch over the QEMUs", qemus_in_new_beat, BEAT_DEADLINE_S)
        if len(qemus) != 1:
            raise BedError(f"the watch sees {len(qemus)} QEMUs where there should be one: {qemus}")
        return qemus[0]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Returns the checkpoint events of the VM's protector on the node that runs the guest."""
        self.watch_events()
        pid = self.pid(self._node) if self._node else None
        if pid is None:
            return []
        # The link in the run directory is absolute, so it would lead out of the node.
        path = Path(f"/proc/{pid}/root/var/log/rekindle/{VM}/protect.log")
        tail = self._tails.get("checkpoints")
        if tail is None or tail.path != path:
            self._checkpoints = []
        try:
            lines = self._new_lines("checkpoints", path)
        except OSError:
            return []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line of text, not an event
            if isinstance(event, dict) and event.get("event") == "checkpoint":
                self._checkpoints.append(event)
        return self._checkpoints

    def settle(self, checkpoints: int) -> list[dict[str, Any]]:
        """Waits until all nodes are members and the client is answered; then returns the next `checkpoints` events."""
        answers_before = len(self.answers())
        # Does not query Pacemaker before the first answers, since queries use the processor and delay a fail-over.
        wait_for("answers", lambda: len(self.answers()) > answers_before + ANSWERS_BEFORE_QUERIES)
        last_number = max((event["number"] for event in self.checkpoints()), default=0)

        def all_online() -> bool:
            # Switches a node on only after its fencing, since the node would otherwise be fenced again, and only after
            # its guest has answered, so that the guest is not being restored.
            for node in NODES:
                if self.pid(node) is None and is_switched_off(self.events(), node):
                    self.call("on", node)
            return self._online() == set(NODES)

        wait_for("all nodes to be online", all_online, every_s=PACEMAKER_POLL_S)

        def enough_new_checkpoints() -> list[dict[str, Any]] | None:
            new_events = [event for event in self.checkpoints() if event["number"] > last_number]
            return new_events[-checkpoints:] if len(new_events) > checkpoints else None

        # The first checkpoint is omitted, since it may have waited for earlier work.
        return wait_for("checkpoints", enough_new_checkpoints, every_s=0.1)

    def _online(self) -> set[str]:
        """Returns the nodes that Pacemaker lists as online, by the first node that is on."""
        for node in NODES:
            if self.pid(node) is not None:
                text = self.call("run", node, "crm_mon", "-1", check=False)
                line = next((line for line in text.splitlines() if "Online: [" in line), "")
                return set(line.partition("[")[2].partition("]")[0].split())
        return set()


def is_switched_off(events: Iterable[BedEvent], node: str) -> bool:
    """Returns whether the last event of a node is that the power switch has ended it.

    >>> is_switched_off([BedEvent(1.0, "kill n1"), BedEvent(1.1, "n1 gone")], "n1")
    False
    >>> texts = ["cut n1", "switch off n1 rc=0", "kill n2", "heal n1"]
    >>> is_switched_off([BedEvent(1.0, text) for text in texts], "n1")
    True
    """
    switched_off = f"switch off {node} rc=0"
    of_node = [event.text for event in events if event.text in (f"kill {node}", f"{node} on", switched_off)]
    return bool(of_node) and of_node[-1] == switched_off


@contextmanager
def bed(
    root: Path,
    rekindle: Path,
    qemu: str,
    micro: Path,
    work: Path,
    every: str,
    *,
    output_commit: bool = False,
    patience_s: float = counter.PATIENCE,
) -> Iterator[Bed]:
    """Starts a bed with a VM and a client, and watches them. `work`: a folder for the bed alone, on a real disk."""
    environment = os.environ | {
        "BED": str(work / "bed"),
        "REKINDLE": str(rekindle),
        "QEMU": qemu,
        "MICRO": str(micro),
        "EVERY": every,
        "NODES": " ".join(NODES),
    }
    started_bed = Bed(root, work / "bed", environment)
    with ExitStack() as stack:
        stack.callback(started_bed.call, "down", check=False)
        started_bed.call("up")
        command = [sys.executable, str(Path(__file__).parent / "running.py"), VM, str(started_bed.running_file)]
        started_bed.watcher = watcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        stack.callback(watcher.wait)
        stack.callback(watcher.terminate)
        started_bed.call("vm", VM)
        if output_commit:
            started_bed.call("set", VM, "output_commit", "true")
        started_bed.start_client(patience_s)
        stack.callback(started_bed.stop_client)
        yield started_bed
