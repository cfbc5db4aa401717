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
"""Deadline for a whole workload, in s."""
_PROGRESS_LINE = re.compile(r"rekindle-work (begins|at|done)(?: (\w+))?")
"""A line of the guest's console. After `at` it has the number of finished units, after `done` the result's digest."""


class WorkError(Exception):
    """A workload did not start, or made no progress. The text names the guest and its output."""


class Mark(NamedTuple):
    """Progress that was seen on the console."""

    host_s: float
    """When, in seconds since 1970 by the host's clock."""
    units: float
    """Number of units that were finished then."""


@dataclass
class Window:
    """A piece of work, executed once. Times are seconds since 1970 by the host's clock.

    Progress is counted in units, such as compiled files. Between two marks it is interpolated: linearly in `units_at`
    and its inverse `time_of_units`; in `units_at_speed_of` at the speed of another, undisturbed execution of the work.
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
    """In the order in which they were seen. A restore sets a guest back to its checkpoint, so a later mark may have
    fewer units than an earlier one."""

    @property
    def seconds(self) -> float:
        """Duration of the work in seconds."""
        return self.ended - self.began

    def _marks_with_begin_and_end(self) -> list[Mark]:
        return [Mark(self.began, 0), *self.marks, Mark(self.ended, self.count)]

    def units_at(self, host_s: float) -> float:
        """Returns the number of units that were finished at a time."""
        for before, after in pairwise(self._marks_with_begin_and_end()):
            if after.host_s >= host_s:
                duration_s = after.host_s - before.host_s
                share = (host_s - before.host_s) / duration_s if duration_s > 0 else 1.0
                return before.units + max(0.0, share) * (after.units - before.units)
        return float(self.count)

    def time_of_units(self, units: float) -> float:
        """Returns when this number of units was finished."""
        for before, after in pairwise(self._marks_with_begin_and_end()):
            if after.units >= units:
                advance = after.units - before.units
                share = (units - before.units) / advance if advance > 0 else 1.0
                return before.host_s + share * (after.host_s - before.host_s)
        return self.ended

    def units_at_speed_of(self, reference: "Window", host_s: float) -> float:
        """Returns the number of units that were finished at a time, if work after the last mark was as in `reference`.

        So a unit may take longer than others. `reference`: the same work, undisturbed.
        """
        marks_until_then = bisect_right(self.marks, host_s, key=lambda mark: mark.host_s)
        if not marks_until_then:
            return 0.0
        mark = self.marks[marks_until_then - 1]
        since_mark_s = host_s - mark.host_s
        # The reference had as many units as the mark at this time, and then worked for as long.
        time_in_reference = reference.time_of_units(mark.units)
        return reference.units_at(time_in_reference + since_mark_s)


class Worker(Protocol):
    """A guest that accepts commands for work."""

    @property
    def name(self) -> str:
        """Name of the guest."""

    def command(self, line: str, deadline: float = ..., port: int = ...) -> str:
        """Sends a line to one of the guest's ports and returns the reply."""


@dataclass
class Work:
    """The workloads of one guest."""

    guest: Worker
    run_dir: Path
    """Rekindle's run directory."""
    console: Path | None = None
    """The guest's console log, if it is not in `run_dir`."""

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

    def run(self, what: str, count: int, first: int = 1, on_mark: Callable[[Window], None] | None = None) -> Window:
        """Executes a piece of work, from unit `first` on, and returns its times. Calls `on_mark` after each mark.

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
                    if on_mark is not None:
                        on_mark(window)
                else:
                    window.ended, window.digest = now, argument
                    return window
            if time.monotonic() > deadline:
                raise WorkError(f"{self.guest.name}: {what} {count}: not done within {WORK_DEADLINE_S:g} s")
            time.sleep(POLL_S)
