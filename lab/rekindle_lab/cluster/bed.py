"""`cluster/bed` from Python: up, faults, what is watched meanwhile; all is taken down at the end."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from . import counter, running

T = TypeVar("T")
DEADLINE_S = 120.0
NODES = ("n1", "n2", "n3")
VM = "web"
ADDRESS = "10.99.0.50"
STORE = "tls://10.99.0.100:7001/web"


class BedError(Exception):
    """Something did not come about in time, or `cluster/bed` has failed."""


def wait_for(what: str, ask: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """Ask until there is an answer."""
    until = time.monotonic() + deadline_s
    while True:
        answer = ask()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > until:
            raise BedError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.02)


@dataclass
class Bed:
    """A test bed that is up."""

    root: Path
    """The project's folder."""
    folder: Path
    """The bed's own."""
    environment: dict[str, str]
    client: subprocess.Popen[bytes] | None = None

    @property
    def counter_file(self) -> Path:
        """What the client writes."""
        return self.folder.parent / "counter.jsonl"

    @property
    def running_file(self) -> Path:
        """What the QEMUs say."""
        return self.folder.parent / "running.jsonl"

    def call(self, *words: str, check: bool = True) -> str:
        """Run `cluster/bed WORDS`."""
        done = subprocess.run(
            [self.root / "cluster" / "bed", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise BedError(f"cluster/bed {' '.join(words)}: exit status {done.returncode}: {done.stderr.strip()}")
        return done.stdout.strip()

    def listen(self, patience_s: float = counter.PATIENCE) -> None:
        """Start the client, or another one in the place of the one that there is: an answer may take it so long."""
        self.deaf()
        inside = [
            str(self.root / "cluster" / "bed"),
            "client",
            sys.executable,
            str(Path(__file__).parent / "counter.py"),
        ]
        command = [*inside, ADDRESS, str(self.counter_file), "20", str(patience_s)]
        self.client = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL)

    def deaf(self) -> None:
        """End the client."""
        if self.client is not None:
            self.client.terminate()
            self.client.wait()
            self.client = None

    def where(self) -> str | None:
        """The node on which Pacemaker has the VM."""
        return self.call("where", VM, check=False) or None

    def pid(self, node: str) -> int | None:
        """A node's PID 1; none when it is off."""
        path = self.folder / f"pid.{node}"
        return int(path.read_text()) if path.exists() else None

    def events(self) -> list[tuple[float, str]]:
        """What was done to nodes and store, and what the switch has done: seconds since 1970, and words."""
        lines = (self.folder / "shared" / "events").read_text().splitlines()
        return [(float(at), words) for at, words in (line.split(" ", 1) for line in lines)]

    def fenced_us(self, node: str, since_us: int) -> int | None:
        """When the switch had ended a node."""
        done = f"switch off {node} rc=0"
        found = [at for at, words in self.events() if words == done and at * 1e6 >= since_us]
        return int(found[0] * 1e6) if found else None

    def answers(self) -> list[counter.Answer]:
        """All that the client was told."""
        return counter.read(self.counter_file) if self.counter_file.exists() else []

    def spans(self) -> list[running.Span]:
        """When a guest ran."""
        return running.read(self.running_file, time.time_ns() // 1000) if self.running_file.exists() else []

    def checkpoints(self) -> list[dict[str, Any]]:
        """What the protector of the VM has said of its checkpoints, on the node where it runs."""
        node = self.where()
        pid = self.pid(node) if node else None
        if pid is None:
            return []
        try:
            lines = Path(f"/proc/{pid}/root/run/rekindle/{VM}/protect.log").read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off, or a word to people
            if event.get("event") == "checkpoint":
                found.append(event)
        return found

    def settle(self, checkpoints: int) -> list[dict[str, Any]]:
        """Wait until all nodes are members, the client is answered, and so many checkpoints came in a row; those."""
        since = max((event["number"] for event in self.checkpoints()), default=0)
        heard = len(self.answers())
        wait_for("answers", lambda: len(self.answers()) > heard + 10)

        def all_online() -> bool:
            # Not before it was fenced: it would be so once more. Nor while its guest is waited for.
            for node in NODES:
                if self.pid(node) is None and is_switched_off(self.events(), node):
                    self.call("on", node)
            return self._online() == set(NODES)

        wait_for("all nodes to be online", all_online)

        def newer() -> list[dict[str, Any]] | None:
            told = [event for event in self.checkpoints() if event["number"] > since]
            return told[-checkpoints:] if len(told) > checkpoints else None

        # The first of them may have had to wait for what was before.
        return wait_for("checkpoints", newer)

    def _online(self) -> set[str]:
        for node in NODES:
            if self.pid(node) is not None:
                text = self.call("run", node, "crm_mon", "-1", check=False)
                line = next((line for line in text.splitlines() if "Online: [" in line), "")
                return set(line.partition("[")[2].partition("]")[0].split())
        return set()


def is_switched_off(events: list[tuple[float, str]], node: str) -> bool:
    """Whether the last that is known of a node is that the switch has ended it.

    >>> is_switched_off([(1.0, "kill n1"), (1.1, "n1 gone")], "n1")
    False
    >>> is_switched_off([(1.0, "cut n1"), (3.0, "switch off n1 rc=0"), (3.1, "kill n2"), (4.0, "heal n1")], "n1")
    True
    """
    off = f"switch off {node} rc=0"
    about = [words for _, words in events if words in (f"kill {node}", f"{node} on", off)]
    return bool(about) and about[-1] == off


@contextmanager
def bed(root: Path, rekindle: Path, qemu: str, micro: Path, work: Path, every: str) -> Iterator[Bed]:
    """A bed with a VM and its client, watched. `work`: a folder of its own, on a real disk."""
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
        here.call("vm", VM)
        here.listen()
        stack.callback(here.deaf)
        command = [sys.executable, str(source / "running.py"), VM, str(here.running_file)]
        watcher = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        stack.callback(watcher.wait)
        stack.callback(watcher.terminate)
        yield here
