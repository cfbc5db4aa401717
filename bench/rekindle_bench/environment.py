"""The environment of a benchmark: folders, a network namespace and VMs. Everything is removed when a run ends.

`Setup` is what the command line gives; a topic makes its `Environment` from it, and passes that to every case.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rekindle_bench.case import NoRoomError, Trial
from rekindle_bench.rows import RowFile
from rekindle_lab import guests
from rekindle_lab.guests import Guest
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.runs.workspace import Workspace

MIB = 1 << 20
RESERVE_MIB = 1024
"""Memory and disk that a case leaves free, for the host's own use."""
AnyGuest = TypeVar("AnyGuest", bound=Guest)
AnyEnvironment = TypeVar("AnyEnvironment", bound="Environment")


@dataclass
class Environment:
    """Shared by all cases of a topic: VMs, folders, the file of rows, and notes on failures."""

    root: Path
    """The folder of the project."""
    rekindle: Rekindle
    qemu: str
    """The QEMU binary."""
    rows: RowFile
    space: Workspace
    began: float = field(default_factory=time.monotonic, kw_only=True)
    """Start of the run, by the monotonic clock."""
    left_out: list[str] = field(default_factory=list, kw_only=True)
    """What the cases omit, as lines for the report."""
    errors: list[str] = field(default_factory=list, kw_only=True)
    trial: Trial | None = field(default=None, kw_only=True)
    """`None` unless the run is a trial."""
    images: dict[str, guests.Image] = field(default_factory=dict, kw_only=True)
    """Images that are built, by kind."""

    @property
    def work(self) -> Path:
        """Folder of run directories and sockets."""
        return self.space.work

    @property
    def ram_dir(self) -> Path:
        """Folder of guest RAM."""
        return self.space.ram

    @property
    def disk_dir(self) -> Path:
        """Folder on a real disk."""
        return self.space.disk

    @property
    def netns(self) -> str:
        """Network namespace of guests and clients."""
        return self.space.namespaces[0]

    def log(self, text: str) -> None:
        """Logs progress."""
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def image(self, kind: str) -> guests.Image:
        """Returns the guest image, built if necessary. In a trial `micro` replaces every other image."""
        if kind not in self.images:
            build = guests.build_stand_in if self.trial and kind != "micro" else guests.build
            self.images[kind] = build(self.root, kind)
        return self.images[kind]

    def guest(self, name: str, kind: str, memory_mib: int, index: int, touch: str | None = None) -> Guest:
        """Returns a guest with its files in this environment. `index`, `touch`: see `Guest`."""
        image = self.image(kind)
        return Guest(
            name,
            image=image,
            memory_mib=memory_mib,
            index=index,
            touch=touch,
            netns=self.netns,
            ram_dir=self.ram_dir,
            disk_dir=self.disk_dir,
        )

    def need(self, memory_mib: int = 0, disk_mib: int = 0) -> None:
        """Raises `NoRoomError` unless this much memory and disk is free, with a small reserve."""
        available = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free_mib = int(available[1]) // 1024 if available else 0
        memory_mib, disk_mib = memory_mib + RESERVE_MIB, disk_mib + RESERVE_MIB
        if free_mib < memory_mib:
            raise NoRoomError(f"needs {memory_mib} MiB of memory, {free_mib} MiB are available")
        free_disk_mib = shutil.disk_usage(self.disk_dir).free // MIB
        if free_disk_mib < disk_mib:
            raise NoRoomError(f"needs {disk_mib} MiB of disk in {self.disk_dir}, {free_disk_mib} MiB are free")

    @contextmanager
    def ours(self, guest: AnyGuest, *, wait: bool = True) -> Iterator[AnyGuest]:
        """Runs a VM of Rekindle, ready unless `wait` is false; stops it at the end."""
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
                if "there is no VM" not in str(error):  # the VM may be missing after a case that failed
                    self.log(f"{guest.name} may still be running: {error}")
            if guest.disk:
                guest.disk.unlink(missing_ok=True)


@dataclass(frozen=True)
class Setup:
    """What an environment is made from."""

    root: Path
    """The folder of the project."""
    binary: Path
    """The `rekindle` binary that is measured."""
    qemu: str
    rows: RowFile
    disk: Path
    """A folder on a real disk."""
    plan: Any = None
    """The topic's own type of plan."""

    @contextmanager
    def workspace(self, namespaces: Sequence[str] = ("",)) -> Iterator[Workspace]:
        """Makes the folders and network namespaces of a benchmark, removed at its end.

        `namespaces`: suffixes of the namespaces' names, one for each namespace.
        """
        work = Path(tempfile.mkdtemp(prefix="rkb", dir="/dev/shm"))
        names = tuple(f"rkb{os.getpid()}{suffix}" for suffix in namespaces)
        space = Workspace(binary=self.binary, work=work, disk=self.disk / f"bench-{work.name}", namespaces=names)
        with space.created():
            yield space

    def environment(self, kind: type[AnyEnvironment], space: Workspace, **fields: Any) -> AnyEnvironment:  # noqa: ANN401
        """Makes an environment of a kind in a workspace. `fields`: those that the kind adds to `Environment`."""
        # The peers let the QEMUs of Rekindle's guests write files that are not of the VM.
        config = space.work / "host.toml"
        config.write_text('qemu_own_user = "off"\n')
        rekindle = Rekindle(self.binary, space.work / "run", config)
        return kind(self.root, rekindle, self.qemu, self.rows, space, **fields)
