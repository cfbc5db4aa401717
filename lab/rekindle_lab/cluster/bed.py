"""Drives `tests/cluster/bed`: starts it, injects faults, watches; removes everything at the end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from . import counter, running
from .tail import Tail

T = TypeVar("T")
DEADLINE_S = 120.0
NODES = ("n1", "n2", "n3")
VM = "web"
ADDRESS = "10.99.0.50"
STORE = "tls://10.99.0.100:7001/web"


class BedError(Exception):
    """A condition was not met in time, or `tests/cluster/bed` failed."""


SELDOM_S = 0.25
"""Seconds between queries to Pacemaker, each of which starts processes."""
BEAT_DEADLINE_S = 10.0


def wait_for(what: str, ask: Callable[[], T | None], deadline_s: float = DEADLINE_S, every_s: float = 0.02) -> T:
    """Polls `ask` until it returns a result; raises `BedError` at the deadline."""
    until = time.monotonic() + deadline_s
    while True:
        answer = ask()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > until:
            raise BedError(f"{what}: not within {deadline_s:g} s")
        time.sleep(every_s)


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
        done = subprocess.run(
            [self.root / "tests/cluster/bed", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise BedError(f"tests/cluster/bed {' '.join(words)}: exit status {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def start_client(self, patience_s: float = counter.PATIENCE) -> None:
        """Starts a client that waits `patience_s` for an answer; replaces a running client."""
        self.stop_client()
        inside = [
            str(self.root / "tests/cluster/bed"),
            "client",
            sys.executable,
            str(Path(__file__).parent / "counter.py"),
        ]
        command = [*inside, ADDRESS, str(self.counter_file), "20", str(patience_s)]
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

    def events(self) -> list[tuple[float, str]]:
        """Returns the faults of nodes and store, and the actions of the power switch: seconds since 1970, and text."""
        lines = (self.folder / "shared" / "events").read_text().splitlines()
        return [(float(at), words) for at, words in (line.split(" ", 1) for line in lines)]

    def fenced_us(self, node: str, since_us: int) -> int | None:
        """Returns when the power switch had ended a node."""
        done = f"switch off {node} rc=0"
        found = [at for at, words in self.events() if words == done and at * 1e6 >= since_us]
        return int(found[0] * 1e6) if found else None

    def _new(self, what: str, path: Path) -> list[str]:
        """Returns the new lines of a file; all lines if the file was replaced since it was last read."""
        tail = self._tails.get(what)
        if tail is None or tail.path != path:
            tail = self._tails[what] = Tail(path)
        return tail.lines()

    def answers(self) -> list[counter.Answer]:
        """Returns all answers to the client so far. The list is always the same object, and grows."""
        lines = self._new("answers", self.counter_file)
        self._answers += [counter.Answer(**json.loads(line)) for line in lines]
        return self._answers

    def watch_events(self) -> list[dict[str, Any]]:
        """Returns all events of the watch over the QEMUs so far. The list is always the same object, and grows."""
        for line in self._new("running", self.running_file):
            event = json.loads(line)
            self._watch_events.append(event)
            if event.get("runs"):
                self._node = event["node"]
        return self._watch_events

    def spans(self) -> list[running.Span]:
        """Returns the spans of time in which a guest ran."""
        return running.spans(self.watch_events(), time.time_ns() // 1000)

    def watched(self) -> tuple[int, str]:
        """Returns the only QEMU and its node, from a watch event after this call.

        Raises `BedError` if the watch or the client has ended, or if there is not exactly one QEMU.
        """
        for name, process in (("the watch over the QEMUs", self.watcher), ("the client", self.client)):
            if process is None or process.poll() is not None:
                raise BedError(f"{name} has ended")
        since = time.time_ns() // 1000

        def beat() -> list[tuple[int, str]] | None:
            last = next((event for event in reversed(self.watch_events()) if "beat" in event), None)
            return [(pid, node) for pid, node in last["beat"]] if last and last["host_us"] > since else None

        seen = wait_for("the watch over the QEMUs", beat, BEAT_DEADLINE_S)
        if len(seen) != 1:
            raise BedError(f"the watch sees {len(seen)} QEMUs where there should be one: {seen}")
        return seen[0]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Returns the checkpoint events of the VM's protector on the node that runs the guest."""
        self.watch_events()
        pid = self.pid(self._node) if self._node else None
        if pid is None:
            return []
        # The link in the run directory is absolute, so it would lead out of the node.
        path = Path(f"/proc/{pid}/root/var/log/rekindle/{VM}/protect.log")
        before = self._tails.get("checkpoints")
        if before is None or before.path != path:
            self._checkpoints = []
        try:
            lines = self._new("checkpoints", path)
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
        """Waits until all nodes are members and the client is answered; then returns the next `checkpoints`."""
        heard = len(self.answers())
        # Does not query Pacemaker before the first answers, since queries use the processor and delay a fail-over.
        wait_for("answers", lambda: len(self.answers()) > heard + 10)
        since = max((event["number"] for event in self.checkpoints()), default=0)

        def all_online() -> bool:
            # Switches a node on only after its fencing, since the node would otherwise be fenced again, and only after
            # its guest has answered, so that the guest is not being restored.
            for node in NODES:
                if self.pid(node) is None and is_switched_off(self.events(), node):
                    self.call("on", node)
            return self._online() == set(NODES)

        wait_for("all nodes to be online", all_online, every_s=SELDOM_S)

        def newer() -> list[dict[str, Any]] | None:
            checkpoints_since = [event for event in self.checkpoints() if event["number"] > since]
            return checkpoints_since[-checkpoints:] if len(checkpoints_since) > checkpoints else None

        # The first checkpoint is omitted, since it may have waited for earlier work.
        return wait_for("checkpoints", newer, every_s=0.1)

    def _online(self) -> set[str]:
        for node in NODES:
            if self.pid(node) is not None:
                text = self.call("run", node, "crm_mon", "-1", check=False)
                line = next((line for line in text.splitlines() if "Online: [" in line), "")
                return set(line.partition("[")[2].partition("]")[0].split())
        return set()


def is_switched_off(events: list[tuple[float, str]], node: str) -> bool:
    """Returns whether the last event of a node is that the power switch has ended it.

    >>> is_switched_off([(1.0, "kill n1"), (1.1, "n1 gone")], "n1")
    False
    >>> is_switched_off([(1.0, "cut n1"), (3.0, "switch off n1 rc=0"), (3.1, "kill n2"), (4.0, "heal n1")], "n1")
    True
    """
    off = f"switch off {node} rc=0"
    about = [words for _, words in events if words in (f"kill {node}", f"{node} on", off)]
    return bool(about) and about[-1] == off


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
    here = Bed(root, work / "bed", environment)
    source = Path(__file__).parent
    with ExitStack() as stack:
        stack.callback(here.call, "down", check=False)
        here.call("up")
        command = [sys.executable, str(source / "running.py"), VM, str(here.running_file)]
        here.watcher = watcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        stack.callback(watcher.wait)
        stack.callback(watcher.terminate)
        here.call("vm", VM)
        if output_commit:
            here.call("set", VM, "output_commit", "true")
        here.start_client(patience_s)
        stack.callback(here.stop_client)
        yield here
