"""Workloads inside the debian-work guest: started by its port 7001, observed on its console by the host's clock."""

import re
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rekindle_lab.guests import WORK_PORT

POLL_S = 0.002
DEADLINE_S = 1800.0
_LINE = re.compile(rb"rekindle-work (begins|at|done)(?: (\w+))?")


class WorkError(Exception):
    """A workload did not start, or made no progress. The text names the guest and its output."""


@dataclass
class Console:
    """The end of a guest's console log, also if a restore replaces the log's file."""

    path: Path
    _inode: int = 0
    _offset: int = 0
    _rest: bytes = b""

    def skip(self) -> None:
        """Skips the present content."""
        stat = self.path.stat()
        self._inode, self._offset, self._rest = stat.st_ino, stat.st_size, b""

    def lines(self) -> list[bytes]:
        """Returns the complete lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                inode = self.path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._offset, self._rest = inode, 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return whole


@dataclass
class Window:
    """A piece of work: the same for the same `what`, `count` and `first`. Times are seconds of the host's clock."""

    what: str
    count: int
    began: float = 0.0
    ended: float = 0.0
    digest: str = ""
    """Digest of the work's result."""
    marks: list[tuple[float, int]] = field(default_factory=list)
    """Progress by time. After a restore, progress is that of the checkpoint."""

    @property
    def seconds(self) -> float:
        """Duration of the work in seconds."""
        return self.ended - self.began

    def position(self, at: float, like: "Window") -> float:
        """Returns the progress at time `at`, in units; between two marks at the speed of `like`, undisturbed work."""
        index = bisect_right([when for when, _ in self.marks], at) - 1
        if index < 0:
            return 0.0
        when, mark = self.marks[index]
        return like.place(like.reached(mark) + at - when)

    def reached(self, position: float) -> float:
        """Returns when the work reached `position` (seconds of the host's clock), by interpolation between marks."""
        before = (self.began, 0.0)
        for when, mark in [*((w, float(m)) for w, m in self.marks), (self.ended, float(self.count))]:
            if mark >= position:
                share = (position - before[1]) / (mark - before[1]) if mark > before[1] else 1.0
                return before[0] + share * (when - before[0])
            before = (when, mark)
        return self.ended

    def place(self, at: float) -> float:
        """Returns the progress at time `at`, by interpolation between two marks."""
        before = (self.began, 0.0)
        for when, mark in [*((w, float(m)) for w, m in self.marks), (self.ended, float(self.count))]:
            if when >= at:
                share = (at - before[0]) / (when - before[0]) if when > before[0] else 1.0
                return before[1] + max(0.0, share) * (mark - before[1])
            before = (when, mark)
        return float(self.count)


class Worker(Protocol):
    """A guest that accepts commands for work."""

    @property
    def name(self) -> str:
        """Name of the guest."""

    def command(self, line: str, deadline: float = ..., port: int = ...) -> str:
        """Sends a line to one of the guest's ports and returns the reply."""


@dataclass
class Work:
    """The workloads of one guest. `run_dir`: Rekindle's; `console`: the guest's console log, if not in `run_dir`."""

    guest: Worker
    run_dir: Path
    console: Path | None = None

    def __post_init__(self) -> None:
        self._console = Console(self.console or self.run_dir / self.guest.name / "console.log")

    def read_console(self, console: Path) -> None:
        """Switches to another console log, since the guest continues with another run directory."""
        self._console = Console(console)

    def _order(self, line: str) -> None:
        reply = self.guest.command(line, port=WORK_PORT)
        if reply != "ok":
            raise WorkError(f"{self.guest.name}: {line}: {reply}")

    def loop(self, what: str) -> None:
        """Starts the load `what` (`compile` or `transcode`), which runs until `stop`."""
        self._order(f"{what} loop")

    def stop(self) -> None:
        """Ends the work under way."""
        self._order("stop")

    def run(self, what: str, count: int, first: int = 1, at: Callable[[Window], None] | None = None) -> Window:
        """Executes a piece of work, and returns its times. Calls `at` at each progress."""
        window = Window(what, count)
        self._console.skip()
        self._order(f"{what} {count} {first}")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for line in self._console.lines():
                found = _LINE.search(line)
                if found is None:
                    continue
                now, word = time.time(), (found[2] or b"").decode()
                if found[1] == b"begins":
                    window.began = now
                elif found[1] == b"at":
                    window.marks.append((now, int(word)))
                    if at is not None:
                        at(window)
                else:
                    window.ended, window.digest = now, word
                    return window
            if time.monotonic() > deadline:
                raise WorkError(f"{self.guest.name}: {what} {count}: not done within {DEADLINE_S:g} s")
            time.sleep(POLL_S)
