"""Lets many guests fail over together: kills the node that runs all of them, and judges what the others make of it.

    python3 -m rekindle_lab.cluster.many BED_PROGRAM NODE OUT NAME=ADDRESS...

Runs in the network of the clients (`tests/cluster/bed client`), after each VM was added to the bed (`BED` in the
environment). Writes what it measured to OUT (JSON). Exit status 1: a guest is missing or runs twice, does not continue
from its newest complete checkpoint, or has wrong memory; or a commit was lost that its protector had reported.

What each guest has lost is judged by three independent records: the events of its protector, in the log of the node
that is killed; the answers to a client of its counter; and the list of checkpoints in its store.
Needs only Python itself.
"""

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bed import BedError, wait_for
from .events import read_events
from .running import TICK

PORT = 7000
TOUCH = "8M"
"""Memory of each guest whose content is verified."""
DIRTY = "1 1"
"""Rate and window in MB at which a guest rewrites that memory."""
EVERY_S = 1.0
"""Seconds between two requests of a client, before the node is killed."""
AFTER_KILL_EVERY_S = 0.1
"""Seconds between two requests of a client that waits for its guest's new node."""
CONNECT_S = 0.3
ANSWER_S = 3.0
COMMAND_S = 120.0
SAMPLE_S = 0.5
"""Seconds between two searches for QEMUs."""
PAUSE_S = 10.0
"""Longest pause of a guest for a checkpoint."""
CHECKPOINTS = 3
"""Checkpoints with the verified memory, before the node is killed; on the new node, before guests are judged, one."""
START_DEADLINE_S = 900.0
PARALLEL = 4
"""Number of guests that get commands at the same time."""


@dataclass(frozen=True)
class Answer:
    """One answer of the counter. Times in microseconds since 1970."""

    sent_us: int
    host_us: int
    tick: int


@dataclass(frozen=True)
class Committed:
    """A checkpoint that a protector has reported as committed, and when the guest was stopped for it."""

    number: int
    stopped_us: int


@dataclass
class Guest:
    """A guest, and what is recorded of it."""

    name: str
    address: str
    boot_id: str = ""
    pages: str = ""
    """Answer to the command that has filled its memory."""
    answers: list[Answer] = field(default_factory=list)
    reported: list[Committed] = field(default_factory=list)
    """Commits that the protector on the killed node has reported."""
    restored: int | None = None
    """Checkpoint from which the new node resumed it, by the message of the start."""
    first_tick: int | None = None
    """First tick on its console on the new node."""
    listed: list[tuple[int, int]] = field(default_factory=list)
    """Number and owner epoch of each checkpoint in the store at the end."""
    new_boot_id: str = ""
    verified: str = ""
    """Answer to the command that verifies its memory."""
    running: list[str] = field(default_factory=list)
    """Nodes with a QEMU in which the guest runs, at the end."""

    def command(self, line: str) -> str:
        """Sends a command, and returns its answer."""
        with socket.create_connection((self.address, PORT), COMMAND_S) as connection:
            connection.sendall(line.encode() + b"\n")
            return connection.makefile().readline().strip()


def faults_of(guest: Guest) -> list[str]:
    """Returns what must not happen to a guest, as text.

    >>> guest = Guest("web", "", boot_id="ok 1", pages="ok 8", new_boot_id="ok 1", verified="ok 8", running=["n2"])
    >>> guest.answers = [Answer(10, 20, 5), Answer(90, 110, 6)]
    >>> guest.reported, guest.restored, guest.first_tick = [Committed(3, 50), Committed(4, 100)], 4, 6
    >>> guest.listed = [(3, 7), (4, 7), (5, 9)]
    >>> faults_of(guest)
    []
    >>> guest.listed, guest.first_tick = [(4, 7), (5, 7), (6, 9)], 5
    >>> faults_of(guest)
    ['its first tick is 5, but checkpoint 4 has 5', 'resumed from 4, but 5 was committed']
    """
    faults = []
    if len(guest.running) != 1:
        faults.append(f"runs {len(guest.running)} times: {guest.running}")
    if not guest.boot_id.startswith("ok ") or guest.new_boot_id != guest.boot_id:
        faults.append(f"was booted anew: {guest.boot_id!r}, now {guest.new_boot_id!r}")
    if not guest.pages.startswith("ok ") or guest.verified != guest.pages:
        faults.append(f"wrong memory: {guest.pages!r}, now {guest.verified!r}")
    last = guest.reported[-1] if guest.reported else None
    if last is None or guest.restored is None or guest.restored < last.number:
        faults.append(f"resumed from {guest.restored}, but {last} was reported")
        return faults
    # What a client has received before the guest was stopped for the checkpoint is in it.
    ticks = [answer.tick for answer in guest.answers if answer.host_us < last.stopped_us]
    if not ticks:
        faults.append("no client was answered before the last checkpoint")
    elif guest.first_tick is None or guest.first_tick <= max(ticks):
        faults.append(f"its first tick is {guest.first_tick}, but checkpoint {last.number} has {max(ticks)}")
    epochs = dict(guest.listed)
    of_owner = [number for number, epoch in guest.listed if epoch == epochs.get(guest.restored)]
    if not of_owner:
        faults.append(f"checkpoint {guest.restored} is not in its store")
    elif max(of_owner) != guest.restored:
        faults.append(f"resumed from {guest.restored}, but {max(of_owner)} was committed")
    if len(set(epochs.values())) < 2:
        faults.append("no checkpoint was taken on the new node")
    return faults


def committed(lines: Iterable[str]) -> list[Committed]:
    """Returns the commits in a protector's log. Ignores lines of text, and the last line if it is incomplete."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "checkpoint":
                found.append(Committed(event["number"], event["stopped_host_us"]))
    return found


class Log:
    """The logs of a node's guests. They can be read after the node was killed, which unmounts them."""

    def __init__(self, pid: int) -> None:
        """`pid`: of the node's PID 1."""
        self.folder = os.open(f"/proc/{pid}/root/var/log/rekindle", os.O_RDONLY | os.O_DIRECTORY)

    def lines(self, name: str, file: str) -> list[str]:
        """Returns the lines of a guest's log; none if it does not exist."""
        try:
            number = os.open(f"{name}/{file}", os.O_RDONLY, dir_fd=self.folder)
        except FileNotFoundError:
            return []
        with open(number, errors="replace") as log:  # noqa: PTH123
            return log.read().splitlines()

    def first_tick(self, name: str) -> int | None:
        """Returns the first tick on a guest's console."""
        matches = (TICK.match(line.strip().encode()) for line in self.lines(name, "console.log"))
        return next((int(tick[1]) for tick in matches if tick), None)


def node_of(pid: int) -> str | None:
    """Returns the node in which a process runs; `None` if it has ended."""
    try:
        return Path(f"/proc/{pid}/root/run/node").read_text().strip()
    except OSError:
        return None


def pid_space(pid: int | str) -> str:
    """Returns the PID namespace of a process."""
    return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115


def qemus(names: set[str], spaces: set[str]) -> list[tuple[str, int]]:
    """Returns all QEMUs of these guests in the PID namespaces `spaces`, those of the bed's nodes: name and pid."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if pid_space(pid) not in spaces:
                continue
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
            spy = re.search(rb"/run/spy-([^.]+)\.sock", command_line)
            if spy and spy[1].decode() in names and b"qemu" in command_line.split(b"\0")[0]:
                found.append((spy[1].decode(), int(pid)))
    return found


def is_running(name: str, pid: int) -> bool:
    """Returns whether the guest in a QEMU runs. A QEMU that does not answer counts as running."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(f"/proc/{pid}/root/run/spy-{name}.sock")
            file = connection.makefile("rw")
            for command in ("qmp_capabilities", "query-status"):
                file.write(json.dumps({"execute": command}) + "\n")
            file.flush()
            for line in file:
                answer = json.loads(line).get("return")
                if isinstance(answer, dict) and "running" in answer:
                    return bool(answer["running"])
    except OSError:
        pass
    return True


def runs_within(name: str, pid: int, seconds: float) -> bool:
    """Returns whether the guest in a QEMU runs within this time: it may be stopped for a checkpoint now."""
    with contextlib.suppress(BedError):
        return wait_for("the guest", lambda: is_running(name, pid), seconds, 0.1)
    return False


class Recorder:
    """Requests the counter of each guest, and searches for QEMUs, until it is ended."""

    def __init__(self, guests: Sequence[Guest], spaces: set[str]) -> None:
        """`spaces`: the PID namespaces of the bed's nodes."""
        self.guests = guests
        self.spaces = spaces
        self.is_ended = threading.Event()
        self.killed_us: int | None = None
        """When the node was killed."""
        self.twice: set[str] = set()
        """Guests of which two QEMUs existed at the same time."""
        self.threads = [threading.Thread(target=self.ask, args=(guest,), daemon=True) for guest in guests]
        self.threads.append(threading.Thread(target=self.count, daemon=True))
        for thread in self.threads:
            thread.start()

    def ask(self, guest: Guest) -> None:
        """Requests the counter of a guest repeatedly. Connects again after an error."""
        connection: socket.socket | None = None
        while not self.is_ended.wait(self.pause_s(guest)):
            sent_us = now_us()
            try:
                if connection is None:
                    connection = socket.create_connection((guest.address, PORT), CONNECT_S)
                    connection.settimeout(ANSWER_S)
                connection.sendall(b"tick\n")
                status, tick = connection.recv(64).split()
                if status == b"ok":
                    guest.answers.append(Answer(sent_us, now_us(), int(tick)))
            except (OSError, ValueError):
                if connection is not None:
                    connection.close()
                connection = None

    def pause_s(self, guest: Guest) -> float:
        """Returns the time before the next request to a guest."""
        waits = self.killed_us is not None and not (guest.answers and guest.answers[-1].sent_us > self.killed_us)
        return AFTER_KILL_EVERY_S if waits else EVERY_S

    def count(self) -> None:
        """Counts the QEMUs of each guest repeatedly."""
        names = {guest.name for guest in self.guests}
        while not self.is_ended.wait(SAMPLE_S):
            counts = Counter(name for name, _ in qemus(names, self.spaces))
            self.twice |= {name for name, number in counts.items() if number > 1}

    def end(self) -> None:
        """Ends all threads."""
        self.is_ended.set()
        for thread in self.threads:
            thread.join()


def now_us() -> int:
    """Returns the time in microseconds since 1970."""
    return time.time_ns() // 1000


class Run:
    """One run in a bed that is up."""

    def __init__(self, program: str, node: str, guests: Sequence[Guest]) -> None:
        self.program = program
        self.node = node
        self.guests = guests
        self.folder = Path(os.environ["BED"])
        self.names = {guest.name for guest in guests}
        self.started = time.monotonic()

    def report(self, text: str) -> None:
        """Prints what happens now."""
        print(f"many: {text} ({time.monotonic() - self.started:.0f}s)", flush=True)

    def bed(self, *words: str) -> str:
        """Runs `tests/cluster/bed WORDS`."""
        return subprocess.run([self.program, *words], check=True, capture_output=True, text=True).stdout

    def pid(self, node: str) -> int:
        """Returns a node's PID 1."""
        return int((self.folder / f"pid.{node}").read_text())

    def others(self) -> list[str]:
        """Returns the nodes that are on, without the one that is killed."""
        nodes = (file.suffix[1:] for file in self.folder.glob("pid.n*"))
        return sorted(node for node in nodes if node != self.node)

    def prepare(self, guest: Guest) -> None:
        """Fills memory of a guest, and lets it rewrite a part of it."""
        seed = 1 + self.guests.index(guest)
        guest.boot_id = guest.command("boot-id")
        guest.pages = guest.command(f"touch {TOUCH} {seed}")
        if not guest.command(f"dirty {DIRTY}").startswith("ok"):
            raise BedError(f"{guest.name}: dirty {DIRTY} was rejected")

    def protect(self, log: Log) -> None:
        """Waits until the memory of each guest is in several checkpoints."""
        since_us = now_us()

        def are_protected() -> bool:
            for guest in self.guests:
                guest.reported = committed(log.lines(guest.name, "protect.log"))
            count = min(sum(event.stopped_us > since_us for event in guest.reported) for guest in self.guests)
            return count >= CHECKPOINTS

        wait_for(f"{CHECKPOINTS} checkpoints of each guest", are_protected, START_DEADLINE_S, 1.0)

    def kill(self) -> tuple[int, int]:
        """Kills the node. Returns when, and when all of its processes had ended."""
        self.bed("kill", self.node)

        def gone_us() -> int | None:
            gone = [event.host_us for event in read_events(self.folder) if event.text == f"{self.node} gone"]
            return gone[-1] if gone else None

        ended_us = wait_for("the end of the node", gone_us)
        kills = [event.host_us for event in read_events(self.folder) if event.text == f"kill {self.node}"]
        return kills[-1], ended_us

    def judge_new(self, guest: Guest, log_of_node: dict[str, Log]) -> None:
        """Collects what is known of a guest on its new node."""
        guest.command("dirty 0")
        guest.verified = guest.command("verify")
        guest.new_boot_id = guest.command("boot-id")
        listing = json.loads(self.bed("store", "ls", guest.name))
        guest.listed = [(each["number"], each["info"]["epoch"]) for each in listing["checkpoints"] if each["info"]]
        for log in log_of_node.values():
            guest.first_tick = guest.first_tick or log.first_tick(guest.name)

    def read_starts(self) -> list[str]:
        """Reads from Pacemaker's logs from which checkpoint each guest resumed. Returns the failed actions."""
        failures = []
        for node in self.others():
            text = Path(f"/proc/{self.pid(node)}/root/var/log/pacemaker/pacemaker.log").read_text(errors="replace")
            for guest in self.guests:
                resumed = re.findall(rf"\b{guest.name} resumed from checkpoint (\d+)", text)
                if resumed:
                    guest.restored = int(resumed[-1])
            failures += re.findall(r"Result of .* operation for .* (?:Timed Out|error|failed).*", text)
        return failures

    def run(self, out: Path) -> list[str]:
        """Runs it. Returns what must not happen, as text."""
        log = wait_for("a log", lambda: _log_of(self.pid(self.node)), START_DEADLINE_S, 0.5)
        spaces = {pid_space(self.pid(node)) for node in (self.node, *self.others())}
        recorder = Recorder(self.guests, spaces)
        self.report("waiting for the guests")
        wait_for("all guests to answer", lambda: all(g.answers for g in self.guests), START_DEADLINE_S, 0.5)
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(self.prepare, self.guests))
        self.report(f"all answer; waiting for {CHECKPOINTS} checkpoints of each")
        self.protect(log)
        before_kill = load()
        killed_us, gone_us = self.kill()
        recorder.killed_us = gone_us
        for guest in self.guests:
            guest.reported = committed(log.lines(guest.name, "protect.log"))
        self.report(f"{self.node} was killed; load {before_kill}")

        def first_us(guest: Guest) -> int | None:
            return next((answer.host_us for answer in guest.answers if answer.sent_us > gone_us), None)

        def all_answer() -> bool:
            return all(first_us(guest) for guest in self.guests)

        with contextlib.suppress(BedError):
            wait_for("all guests to answer again", all_answer, START_DEADLINE_S, 0.5)
        answered = {guest.name: first_us(guest) for guest in self.guests}
        missing = sorted(name for name, host_us in answered.items() if host_us is None)
        times = sorted((host_us - killed_us) / 1e6 for host_us in answered.values() if host_us is not None)
        failures = self.read_starts()
        fencings = [each.host_us for each in read_events(self.folder) if each.text == f"switch off {self.node} rc=0"]
        result: dict[str, Any] = {
            "guests": len(self.guests),
            "ended_s": (gone_us - killed_us) / 1e6,
            "fenced_s": (fencings[-1] - killed_us) / 1e6 if fencings else None,
            "answered_s": times,
            "load": before_kill,
            "missing": missing,
            "failed_actions": failures,
        }
        out.write_text(json.dumps(result) + "\n")
        if missing:
            recorder.end()
            return [f"{name}: does not answer" for name in missing]
        self.report(
            f"all {len(times)} answer; s after the kill: first {times[0]:.1f}, median {statistics.median(times):.1f}, "
            f"worst {times[-1]:.1f}; failed actions: {len(failures)}"
        )
        logs = {node: each for node in self.others() if (each := _log_of(self.pid(node))) is not None}

        def are_protected_again() -> bool:
            return all(
                any(committed(each.lines(guest.name, "protect.log")) for each in logs.values()) for guest in self.guests
            )

        wait_for("a checkpoint of each guest on its new node", are_protected_again, START_DEADLINE_S, 1.0)
        self.report("each has a checkpoint on its new node")
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda guest: self.judge_new(guest, logs), self.guests))
        by_name = {guest.name: guest for guest in self.guests}
        for name, pid in qemus(self.names, spaces):
            if runs_within(name, pid, PAUSE_S):
                by_name[name].running.append(node_of(pid) or "?")
        recorder.end()
        result["checkpoints"] = {
            guest.name: {"reported": guest.reported[-1].number if guest.reported else None, "restored": guest.restored}
            for guest in self.guests
        }
        out.write_text(json.dumps(result) + "\n")
        faults = [f"{guest.name}: {fault}" for guest in self.guests for fault in faults_of(guest)]
        return faults + [f"{name}: two QEMUs at the same time" for name in sorted(recorder.twice)]


def _log_of(pid: int) -> Log | None:
    with contextlib.suppress(OSError):
        return Log(pid)
    return None


def load() -> str:
    """Returns the load of the machine."""
    return Path("/proc/loadavg").read_text().strip()


def main() -> None:
    """Runs with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="many")
    parser.add_argument("program", help="tests/cluster/bed")
    parser.add_argument("node", help="the node to kill")
    parser.add_argument("out", type=Path)
    parser.add_argument("guests", nargs="+", metavar="NAME=ADDRESS")
    arguments = parser.parse_args()
    guests = [Guest(*text.split("=", 1)) for text in arguments.guests]
    faults = Run(arguments.program, arguments.node, guests).run(arguments.out)
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
