"""The emulated host of a benchmark: runs commands in it, and observes it from outside, with times.

`machine` starts one: a QEMU that runs a whole KVM host (tests/hosts). `Guest` is a guest of that host.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_lab import netns

MEMORY = "4G"
"""RAM of the host."""
RESERVE_MIB = 1536
"""The part of it that outlives the host's kernel, for guests: enough for one guest of 1 GiB, or for four small ones."""
COMMAND_S = 120.0
"""Deadline of a command in the host."""
UP_S = 300.0
"""Deadline for a host or a guest to answer after its start."""
COMMAND_PORT, ECHO_PORT = 7000, 7
"""Ports of a guest (tests/images/build, `micro`)."""


class MachineError(Exception):
    """A command in the emulated host failed. The text has the command and its output."""


def now_us() -> int:
    """Returns microseconds since 1970 by the measuring machine's clock."""
    return time.time_ns() // 1000


@dataclass
class HostObservations:
    """Observations of the host in their order, each with the time of this machine's clock."""

    console: list[tuple[int, str]] = field(default_factory=list)
    """Time and text of each console line."""
    resets: list[int] = field(default_factory=list)
    """Times of resets. All times are microseconds since 1970."""

    def last_line(self, pattern: str, since_us: int) -> int | None:
        """Returns the time of the last console line that matches `pattern`, if any."""
        times_us = [at_us for at_us, line in list(self.console) if at_us >= since_us and re.search(pattern, line)]
        return times_us[-1] if times_us else None

    def first_reset(self, since_us: int) -> int | None:
        """Returns the time of the first reset of the host after `since_us`, if any."""
        return next((at_us for at_us in list(self.resets) if at_us >= since_us), None)


class Machine:
    """A running emulated host, made by `machine`."""

    def __init__(self, run: Path, folder: Path, rekindle: Path) -> None:
        """`run`: path of tests/hosts/run; `folder`: its working folder."""
        self.run, self.folder, self.rekindle = run, folder, rekindle
        self.netns = (folder / "netns").read_text().strip()
        self.seen = HostObservations()

    def ask(self, command: str, timeout: float = COMMAND_S, standard_input: str | None = None) -> str:
        """Runs a command in the host and returns the output; raises `MachineError` unless it succeeds."""
        try:
            result = subprocess.run(
                [self.run, "exec", self.folder, command],
                capture_output=True,
                text=True,
                input=standard_input if standard_input is not None else "",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{command}: not finished within {timeout:g} s") from error
        if result.returncode != 0:
            output = (result.stderr.strip() or result.stdout.strip())[-1500:]
            raise MachineError(f"{command}: exit status {result.returncode}: {output}")
        return result.stdout

    def write(self, path: str, text: str) -> None:
        """Writes a file in the host."""
        self.ask(f"mkdir -p $(dirname {path}) && cat > {path}", standard_input=text)

    def boot(self) -> tuple[str, int]:
        """Returns the host's boot ID, and when its kernel began by this machine's clock."""
        before = now_us()
        boot_id, uptime = self.ask("cat /proc/sys/kernel/random/boot_id /proc/uptime").split()[:2]
        # The uptime was read at an unknown time between `before` and now.
        return boot_id, (before + now_us()) // 2 - int(float(uptime) * 1e6)

    def wait_boot(self, before: str, deadline_s: float = UP_S) -> tuple[str, int]:
        """Returns boot ID and start of the kernel for a boot other than `before`, once the host can be reached."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                boot = self.boot()
                if boot[0] != before:
                    return boot
            except MachineError:
                pass
            if time.monotonic() > end:
                raise MachineError(f"not up again within {deadline_s:g} s: {self.console()[-1000:]}")
            time.sleep(0.5)

    def console(self) -> str:
        """Returns the host's console output so far."""
        return (self.folder / "console.log").read_text(errors="replace")


@contextmanager
def machine(root: Path, binary: Path, micro: Path, folder: Path) -> Iterator[Machine]:
    """Starts a host in the new folder `folder`, set up for guests that outlive its kernel; removed afterwards."""
    run = root / "tests/hosts/run"
    environment = {**os.environ, "HOST_MEMORY": MEMORY, "HOST_RESERVE": f"{RESERVE_MIB}M!4G"}
    with ExitStack() as stack:
        stack.callback(subprocess.run, [run, "stop", folder], check=False, capture_output=True)
        result = subprocess.run(
            [run, "start", folder, binary, micro], env=environment, capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            raise MachineError(f"tests/hosts/run start: {result.stderr.strip()[-1500:]}")
        host = Machine(run, folder, binary)
        stopping = threading.Event()
        for watch in (_watch_console, _watch_events):
            thread = threading.Thread(target=watch, args=(host, stopping), daemon=True)
            thread.start()
            stack.callback(thread.join)
        stack.callback(stopping.set)
        host.ask(f"rekindle host init --reserve {RESERVE_MIB}M --write")
        yield host


def _watch_console(host: Machine, stopping: threading.Event) -> None:
    """Records each line of the console with its time."""
    unfinished = ""
    with (host.folder / "console.log").open(errors="replace") as file:
        while not stopping.wait(0.02):
            if part := file.read():
                *lines, unfinished = (unfinished + part).split("\n")
                read_us = now_us()
                host.seen.console += [(read_us, line) for line in lines]


def _watch_events(host: Machine, stopping: threading.Event) -> None:
    """Records each reset of the host, with the time that QEMU reports."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as qmp:
        qmp.connect(str(host.folder / "qmp"))
        qmp.sendall(b'{"execute": "qmp_capabilities"}\n')
        qmp.settimeout(0.2)
        unfinished = b""
        while not stopping.is_set():
            try:
                part = qmp.recv(65536)
            except TimeoutError:
                continue
            if not part:
                return
            *lines, unfinished = (unfinished + part).split(b"\n")
            for line in lines:
                event: dict[str, Any] = json.loads(line) if line.strip() else {}
                if event.get("event") == "RESET":
                    stamp = event["timestamp"]
                    host.seen.resets.append(stamp["seconds"] * 1_000_000 + stamp["microseconds"])


@dataclass
class Guest:
    """A micro guest in the emulated host, reached from this machine."""

    host: Machine
    name: str
    address: str
    memory_mib: int
    boot_id: str = ""
    """Boot ID when its memory was last filled: another one shows that the guest has booted."""
    session: socket.socket | None = None
    """A connection to its echo port, open during reboots."""

    def definition(self) -> str:
        """Returns the guest's VM definition."""
        words = "console=ttyS0 quiet mitigations=off cryptomgr.notests nokaslr rekindle.tick=0"
        return "\n".join(
            [
                f'name = "{self.name}"',
                f'memory = "{self.memory_mib}M"',
                'accel = "kvm"',
                "[boot]",
                'kernel = "/opt/rekindle/micro/vmlinuz"',
                'initrd = "/opt/rekindle/micro/initrd"',
                f'append = "{words} rekindle.ip={self.address}/16"',
                "[[net]]",
                'kind = "tap"',
                'bridge = "br0"',
                "",
            ]
        )

    def start(self) -> None:
        """Starts the guest."""
        path = f"/root/{self.name}.toml"
        self.host.write(path, self.definition())
        self.host.ask(f"rekindle run {path}", timeout=UP_S)

    def ask(self, line: str, timeout: float) -> str:
        """Sends a command to the guest and returns the reply; waits at most `timeout` seconds."""
        with netns.connect(self.host.netns, self.address, COMMAND_PORT, timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(line.encode() + b"\n")
            with connection.makefile() as answer:
                return answer.readline().strip()

    def wait_ready(self, deadline_s: float = UP_S) -> str:
        """Returns the guest's boot ID once the guest answers; raises at the deadline."""
        return _within(deadline_s, self.name, lambda: self.ask("boot-id", 5.0))

    def fill(self) -> None:
        """Fills all memory that the guest's kernel can spare with a pattern, and opens a connection to the guest."""
        answer = self.ask("touch all 7", UP_S)
        if not answer.startswith("ok"):
            raise MachineError(f"{self.name}: touch: {answer}")
        self.boot_id = self.wait_ready()
        self.end_session()
        self.session = netns.connect(self.host.netns, self.address, ECHO_PORT, 30.0)
        if not self.echoes(b"before"):
            raise MachineError(f"{self.name}: no echo")

    def echoes(self, text: bytes) -> bool:
        """Returns whether the open connection still echoes what is sent."""
        if self.session is None:
            return False
        try:
            self.session.settimeout(120.0)
            self.session.sendall(text)
            echoed = b""
            while len(echoed) < len(text) and (part := self.session.recv(64)):
                echoed += part
        except OSError:
            return False
        return echoed == text

    def end_session(self) -> None:
        """Closes the connection."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def outcome(self, deadline_s: float = UP_S) -> str:
        """Returns the guest's outcome: see `Row.outcome`."""
        try:
            boot_id = self.wait_ready(deadline_s)
            if boot_id != self.boot_id:
                return "booted"
            # Memory that has changed was not kept.
            return "kept" if re.match(r"ok [1-9]", self.ask("verify", UP_S)) else "gone"
        except (MachineError, OSError):
            return "gone"


def _within(deadline_s: float, name: str, ask: Callable[[], str]) -> str:
    """Asks until the answer is `ok ...`, and returns that answer."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            if (answer := ask()).startswith("ok "):
                return answer
        except OSError:
            pass
        if time.monotonic() > end:
            raise MachineError(f"{name} does not answer within {deadline_s:g} s")
        time.sleep(0.1)
