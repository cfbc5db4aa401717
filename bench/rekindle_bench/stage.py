"""The environment of a benchmark: folders, a network namespace and VMs, all removed again, however a run ends."""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from rekindle_bench.rows import RowFile
from rekindle_lab import guests
from rekindle_lab.guests import Guest
from rekindle_lab.rekindle import Rekindle, RekindleError

MIB = 1 << 20
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on_signals(name: str) -> None:
    """Makes termination signals raise `KeyboardInterrupt`, so that what is under way is removed.

    Only the first one does: a second one does not interrupt the removal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for one in _ENDING:
            signal.signal(one, signal.SIG_IGN)
        print(f"{name}: interrupted; taking everything down", file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    for one in _ENDING:
        signal.signal(one, interrupt)


class NoRoomError(Exception):
    """The machine has not enough memory or disk for a case, or a requirement is missing."""


class NotPlannedError(Exception):
    """A plan does not include a case."""


class Plan(Protocol):
    """The common part of the topics' plans."""

    @property
    def budget_s(self) -> float | None:
        """A case that would begin later than this is left out."""


@dataclass(frozen=True)
class Trial:
    """A run that only checks that every case still works."""

    not_tried: Mapping[str, str]
    """Cases that are left out, with reasons."""


@dataclass
class Stage:
    """Everything that cases share."""

    root: Path
    rekindle: Rekindle
    qemu: str
    rows: RowFile
    work: Path
    ram_dir: Path
    disk_dir: Path
    netns: str
    began: float = field(default_factory=time.monotonic, kw_only=True)
    left_out: list[str] = field(default_factory=list, kw_only=True)
    errors: list[str] = field(default_factory=list, kw_only=True)
    failed: list[str] = field(default_factory=list, kw_only=True)
    """The cases with an error."""
    trial: Trial | None = field(default=None, kw_only=True)
    images: dict[str, guests.Image] = field(default_factory=dict, kw_only=True)

    def log(self, text: str) -> None:
        """Logs progress."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def image(self, kind: str) -> guests.Image:
        """Returns the guest image, built if need be. In a trial `micro` stands in for the others."""
        if kind not in self.images:
            build = guests.build_stand_in if self.trial and kind != "micro" else guests.build
            self.images[kind] = build(self.root, kind)
        return self.images[kind]

    def guest(self, name: str, kind: str, memory_mib: int, index: int, touch: str | None = None) -> Guest:
        """Returns a guest of this stage."""
        image = self.image(kind)
        return Guest(name, image, memory_mib, index, touch, self.netns, self.ram_dir, self.disk_dir)

    def need(self, memory_mib: int = 0, disk_mib: int = 0) -> None:
        """Raises `NoRoomError` unless so much memory and disk is free, with a small reserve."""
        available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free_mib = int(available[1]) // 1024 if available else 0
        if free_mib < memory_mib + 1024:
            raise NoRoomError(f"needs {memory_mib + 1024} MiB of memory, {free_mib} MiB are available")
        disk = shutil.disk_usage(self.disk_dir).free // MIB
        if disk < disk_mib + 1024:
            raise NoRoomError(f"needs {disk_mib + 1024} MiB of disk in {self.disk_dir}, {disk} MiB are free")

    @contextmanager
    def ours(self, guest: Guest, *, wait: bool = True) -> Iterator[Guest]:
        """Runs a VM of Rekindle's, ready unless `wait` is false; stops it at the end."""
        definition = guest.write(self.work, self.qemu)
        try:
            self.rekindle.run(definition)
            if wait:
                guest.wait_ready()
            yield guest
        finally:
            try:
                self.rekindle.stop(guest.name)
            except RekindleError as error:
                if "there is no VM" not in str(error):  # a case that failed may have left none
                    self.log(f"{guest.name} may still be running: {error}")
            if guest.disk:
                guest.disk.unlink(missing_ok=True)

    def run(self, cases: Mapping[str, Callable[[Any, Any], None]], plan: Plan, only: list[str]) -> None:
        """Runs the cases, or only those named. Errors of one are recorded, and the next one runs."""
        for name, case in cases.items():
            if only and name not in only:
                self.left_out.append(f"case {name}: not selected")
            elif self.trial and name in self.trial.not_tried:
                self.left_out.append(f"case {name}: not tried: {self.trial.not_tried[name]}")
            elif plan.budget_s is not None and time.monotonic() - self.began > plan.budget_s:
                self.left_out.append(f"case {name}: no time left for it")
            else:
                self._run_case(name, case, plan)

    def _run_case(self, name: str, case: Callable[[Any, Any], None], plan: Plan) -> None:
        errors, rows, room = len(self.errors), self.rows.count, True
        try:
            case(self, plan)
        except NoRoomError as error:
            room = False
            self.left_out.append(f"case {name}: the machine {error}")
        except NotPlannedError:
            if self.trial:
                self.errors.append(f"case {name}: the plan of the trial has none of it")
            else:
                self.left_out.append(f"case {name}: not part of this plan")
        except Exception as error:
            self.errors.append(f"case {name}: {type(error).__name__}: {error}")
            self.log(self.errors[-1])
        if self.trial:
            self.errors += [f"case {name}: {problem}" for problem in self.rows.take_problems()]
            if room and self.rows.count == rows and len(self.errors) == errors:
                self.errors.append(f"case {name}: it measured nothing")
        if len(self.errors) > errors:
            self.failed.append(name)


@dataclass(frozen=True)
class Folders:
    """The folders of a run."""

    work: Path
    """On a tmpfs, as run directories are; with a short path, since it holds unix sockets."""
    ram_dir: Path
    """A tmpfs of its own for guest RAM."""
    disk_dir: Path
    """On a real disk."""


@contextmanager
def folders(disk: Path) -> Iterator[Folders]:
    """Makes the folders of a run, removed at its end. `disk`: a folder on a real disk, for disks, RAM and stores."""
    with ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix="rkb", dir="/dev/shm"))
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        disk.mkdir(parents=True, exist_ok=True)
        disk_dir = Path(tempfile.mkdtemp(prefix="bench-", dir=disk))
        stack.callback(shutil.rmtree, disk_dir, ignore_errors=True)
        ram_dir = work / "ram"
        ram_dir.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=90%,mode=0700", "rekindle-bench", ram_dir], check=True)
        stack.callback(subprocess.run, ["umount", "-l", ram_dir], check=False)
        yield Folders(work, ram_dir, disk_dir)
