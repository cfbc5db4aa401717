"""The stage of this topic: a disk that is held to a rate, and guests on it that are rebooted."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rekindle_lab import guests, netns
from rekindle_lab.bench import stage as bench
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.guests import QEMUS_OWN, Guest
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.slow import Slow, can_be_slow, run, slow_disk
from rekindle_lab.stores import forget

from .plan import LIMITS

IMAGE = "debian-cache"
SSH_DEADLINE_S = 900.0
SHELL_PORT = 7004
"""Instead of ssh, where micro stands in."""
DATA_BYTES = 1600 << 20
"""Of the disk with XFS; the file on it has 1 GiB."""


@dataclass(frozen=True)
class CacheGuest(Guest):
    """A guest with the files, the database and the web server of this topic."""

    SHUTDOWN_TIMEOUT: ClassVar[str] = "5m"

    cache: str = "server"
    """`server`: Rekindle's own; `writeback`, `none`: QEMU's; a path: the socket of one that was started by hand."""
    bytes_per_s: int | None = None
    """What its definition holds the disk to."""
    data: bool = False
    """Whether the file lies on a disk of its own, with XFS: its pages are cached in large pieces (folios)."""

    @property
    def stands_in(self) -> bool:
        """Whether `micro` stands in for it, in a trial."""
        return self.image.kind == "micro"

    @property
    def file(self) -> str:
        """What is read and written."""
        if self.stands_in:
            return "/dev/vda"
        return "/mnt/file" if self.data else "/srv/file"

    @property
    def data_disk(self) -> Path:
        """The disk with XFS."""
        return self.disk_dir / f"{self.name}-data.raw"

    @property
    def disk(self) -> Path | None:
        """Its own copy of the image's disk; one of a server by hand is that server's."""
        return None if self.cache.startswith("/") else self.disk_dir / f"{self.name}.raw"

    def qemu_args(self) -> list[str]:
        """The disk of a server that was started by hand."""
        if self.disk is not None:
            return []
        chardev = f"socket,id=byhand,path={self.cache},reconnect-ms=1000"
        return ["-chardev", chardev, "-device", "vhost-user-blk-pci,chardev=byhand"]

    def disk_lines(self) -> list[str]:
        """Who has its disk, and what the server holds it to."""
        if self.disk is None:
            return []
        how = ["server = true"] if self.cache == "server" else [QEMUS_OWN, f'cache = "{self.cache}"']
        rate = [] if self.bytes_per_s is None else [f'bps = "{self.bytes_per_s}B"']
        paths = [self.disk, self.data_disk] if self.data else [self.disk]
        return [line for path in paths for line in ("[[disk]]", f"path = {json.dumps(str(path))}", *how, *rate)]

    def write(self, folder: Path, qemu: str) -> Path:
        """Write the definition, and copy the disk, of which the host caches nothing then."""
        path = folder / f"{self.name}.toml"
        path.write_text(self.definition(qemu))
        if self.disk is not None:
            guests.copy_sparse(self.image.folder / "disk.raw", self.disk)
            forget(self.disk)
        if self.data:
            with self.data_disk.open("wb") as file:
                file.truncate(DATA_BYTES)
            run("mkfs.xfs", "-q", self.data_disk)
        return path

    def mount(self) -> None:
        """Mount the disk with XFS, if it has one."""
        if self.data:
            self.ssh("modprobe xfs && mount /dev/vdb /mnt")

    def ssh(self, command: str) -> str:
        """Run a command in it, and give what it says."""
        if self.stands_in:
            return self._shell(command)
        options = ["-i", str(self.image.key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        options += ["-o", "LogLevel=ERROR", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60"]
        words = ["ip", "netns", "exec", self.netns, "ssh", *options, f"root@{self.address}", command]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_DEADLINE_S, check=False
        )
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip())[-1000:]
            raise RekindleError(f"{self.name}: {command[:80]}: exit status {done.returncode}: {said}")
        return done.stdout

    def _shell(self, command: str) -> str:
        """The same on the port that `guest/stand-in` has for it."""
        with netns.connect(self.netns, self.address, SHELL_PORT, SSH_DEADLINE_S) as connection:
            connection.settimeout(SSH_DEADLINE_S)
            connection.sendall(command.encode())
            connection.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        said, _, status = reply.rstrip("\n").rpartition("exit ")
        if status != "0":
            raise RekindleError(f"{self.name}: {command[:80]}: exit status {status}: {said[-1000:]}")
        return said


@dataclass
class Stage(bench.Stage):
    """Everything that cases share."""

    slow: Slow | None = None
    """Where guest disks are; none where no disk can be held to a rate."""

    def cached(self, name: str, memory_mib: int, index: int, cache: str = "server") -> CacheGuest:
        """A guest of this topic."""
        self.need(memory_mib=int(memory_mib * 1.1) + 512)
        folder = self.slow.folder if self.slow else self.disk_dir
        image = self.image(IMAGE)
        return CacheGuest(name, image, memory_mib, index, None, self.netns, self.ram_dir, folder, cache)

    def hold(self, limit: str | None) -> None:
        """Hold the disk to one of the limits, or to nothing."""
        if self.slow is None:
            raise bench.NoRoomError("has no block I/O controller of control groups v1, so no disk is held to a rate")
        self.slow.hold(LIMITS[limit] if limit else None)

    def from_attic(self, guest: CacheGuest) -> int:
        """Bytes that its disks' servers have given it out of its former memory; none after a cold reboot."""
        of_all = 0
        for disk in ("disk0", "disk1") if guest.data else ("disk0",):
            control = self.rekindle.run_dir / guest.name / f"disk-{disk}.control"
            status = self.rekindle.call("disk", "status", str(control))
            became = status["attic"][1] if status["attic"] else status["emptied"]
            of_all += became["served"] * 4096 if became else 0
        return of_all

    def reboot(self, guest: CacheGuest, how: str) -> dict[str, object]:
        """Reboot the guest and wait until it is well again."""
        told = self.rekindle.call("reboot", "os", guest.name, "--how", how)
        guest.wait_ready()
        guest.mount()
        return told


@contextmanager
def stage(root: Path, binary: Path, qemu: str, rows: RowFile, disk: Path, *, slow: bool = True) -> Iterator[Stage]:
    """Set the stage: folders, a tmpfs for guest RAM, a network namespace, a disk.

    `disk`: a folder on a real one. `slow`: with one that the kernel holds to a rate, where it can.
    """
    with ExitStack() as stack:
        at = stack.enter_context(bench.folders(disk))
        name = stack.enter_context(netns.namespace(f"rkb{os.getpid()}"))
        held = stack.enter_context(slow_disk(at.disk_dir / "slow", 12288)) if slow and can_be_slow() else None
        rekindle = Rekindle(binary, at.work / "run")
        yield Stage(root, rekindle, qemu, rows, at.work, at.ram_dir, at.disk_dir, name, slow=held)
