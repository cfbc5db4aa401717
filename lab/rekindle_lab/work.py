"""Workloads inside the debian-work guest: started by its port 7001, observed on its console by the host's clock.

The guest prints a mark for each finished part of the work, such as a compiled file. From the times of the marks the lab
computes how much work an interruption has cost.
"""

import re
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

from rekindle_lab.guests import WORK_PORT
from rekindle_lab.tail import Tail

POLL_S = 0.002
"""Seconds between two reads of the console: the error of a mark's time."""
WORK_DEADLINE_S = 1800.0
"""Deadline for a whole workload."""
_PROGRESS_LINE = re.compile(r"rekindle-work (begins|at|done)(?: (\w+))?")


class WorkError(Exception):
    """A workload did not start, or made no progress. The text names the guest and its output."""


class Mark(NamedTuple):
    """Progress that was seen on the console: when, in seconds of the host's clock, and the number of finished units."""

    at: float
    units: float


@dataclass
class Window:
    """A piece of work, executed once. Times are seconds of the host's clock.

    Progress is counted in units, such as compiled files. Between two marks it is interpolated: linearly or, in
    `position`, at the speed at which another, undisturbed execution of the same work did that unit.
    """

    what: str
    """Kind of work: `compile` or `transcode`."""
    count: int
    """Number of units of the whole work."""
    began: float = 0.0
    ended: float = 0.0
    digest: str = ""
    """Digest of the work's result."""
    marks: list[Mark] = field(default_factory=list)
    """After a restore, progress is that of the checkpoint."""

    @property
    def seconds(self) -> float:
        """Duration of the work in seconds."""
        return self.ended - self.began

    def position(self, at: float, like: "Window") -> float:
        """Returns the progress at time `at`, in units; between two marks at the speed of `like`, undisturbed work."""
        last_mark = bisect_right(self.marks, at, key=lambda mark: mark.at) - 1
        if last_mark < 0:
            return 0.0
        mark = self.marks[last_mark]
        return like.place(like.reached(mark.units) + at - mark.at)

    def _all_marks(self) -> list[Mark]:
        """Returns the marks, with the begin and the end."""
        return [Mark(self.began, 0), *self.marks, Mark(self.ended, self.count)]

    def reached(self, position: float) -> float:
        """Returns when the work reached `position` in units, by linear interpolation between marks."""
        for before, after in pairwise(self._all_marks()):
            if after.units >= position:
                advance = after.units - before.units
                share = (position - before.units) / advance if advance > 0 else 1.0
                return before.at + share * (after.at - before.at)
        return self.ended

    def place(self, at: float) -> float:
        """Returns the progress at time `at` in units, by linear interpolation between marks."""
        for before, after in pairwise(self._all_marks()):
            if after.at >= at:
                duration = after.at - before.at
                share = (at - before.at) / duration if duration > 0 else 1.0
                return before.units + max(0.0, share) * (after.units - before.units)
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
        self._console = Tail(self.console or self.run_dir / self.guest.name / "console.log")

    def read_console(self, console: Path) -> None:
        """Switches to another console log, since the guest continues with another run directory."""
        self._console = Tail(console)

    def _send_command(self, line: str) -> None:
        reply = self.guest.command(line, port=WORK_PORT)
        if reply != "ok":
            raise WorkError(f"{self.guest.name}: {line}: {reply}")

    def loop(self, what: str) -> None:
        """Starts the load `what` (`compile` or `transcode`), which runs until `stop`."""
        self._send_command(f"{what} loop")

    def stop(self) -> None:
        """Ends the work under way."""
        self._send_command("stop")

    def run(self, what: str, count: int, first: int = 1, at: Callable[[Window], None] | None = None) -> Window:
        """Executes a piece of work, from unit `first` on, and returns its times. Calls `at` after each mark.

        The same `what`, `count` and `first` are the same work.
        """
        window = Window(what, count)
        self._console.skip()
        self._send_command(f"{what} {count} {first}")
        deadline = time.monotonic() + WORK_DEADLINE_S
        while True:
            for line in self._console.lines():
                report = _PROGRESS_LINE.search(line)
                if report is None:
                    continue
                now, argument = time.time(), report[2] or ""
                if report[1] == "begins":
                    window.began = now
                elif report[1] == "at":
                    window.marks.append(Mark(now, int(argument)))
                    if at is not None:
                        at(window)
                else:
                    window.ended, window.digest = now, argument
                    return window
            if time.monotonic() > deadline:
                raise WorkError(f"{self.guest.name}: {what} {count}: not done within {WORK_DEADLINE_S:g} s")
            time.sleep(POLL_S)
