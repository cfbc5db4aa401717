"""Guests of the warm-cache benchmark, on a disk whose rates can be limited."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rekindle_bench.case import NoRoomError
from rekindle_bench.environment import Environment, Setup
from rekindle_lab import guests
from rekindle_lab.guest_shell import in_guest
from rekindle_lab.guests import QEMUS_OWN, Guest
from rekindle_lab.slow import Slow, can_be_slow, run, slow_disk
from rekindle_lab.stores import forget

from .plan import LIMITS

IMAGE = "debian-cache"
SLOW_DISK_MIB = 12288
"""Size of the disk whose rates can be limited."""
BLOCK_BYTES = 4096
DATA_BYTES = 1600 << 20
"""Size of the disk with XFS; its file has 1 GiB."""


@dataclass(frozen=True)
class CacheGuest(Guest):
    """A guest with a large file, a database and a web server."""

    SHUTDOWN_TIMEOUT: ClassVar[str] = "5m"

    cache: str = "server"
    """`server`: Rekindle's disk server. `writeback`, `none`: QEMU, with that cache mode. A path: the socket of a
    manually started server."""
    bytes_per_s: int | None = None
    """Rate limit in the VM's definition."""
    data: bool = False
    """Whether the file is on a separate disk with XFS, whose pages are cached in large pieces (folios)."""
    sandboxed: bool = True
    """Whether QEMU filters its system calls, as Rekindle starts it by default."""

    @property
    def stands_in(self) -> bool:
        """Whether `micro` replaces this guest, in a trial."""
        return self.image.kind == "micro"

    @property
    def file(self) -> str:
        """Path of the file that the guest reads and writes."""
        if self.stands_in:
            return "/dev/vda"
        return "/mnt/file" if self.data else "/srv/file"

    @property
    def data_disk(self) -> Path:
        """The disk image with XFS."""
        return self.disk_dir / f"{self.name}-data.raw"

    @property
    def disk(self) -> Path | None:
        """The guest's copy of the image's disk; `None` for a server that was started manually."""
        return None if self.cache.startswith("/") else self.disk_dir / f"{self.name}.raw"

    def qemu_args(self) -> list[str]:
        """Returns the arguments that turn the filter of system calls off, and add the disk of a manual server."""
        arguments = [] if self.sandboxed else ["-sandbox", "off"]
        if self.disk is None:
            chardev = f"socket,id=byhand,path={self.cache},reconnect-ms=1000"
            arguments += ["-chardev", chardev, "-device", "vhost-user-blk-pci,chardev=byhand"]
        return arguments

    def disk_lines(self) -> list[str]:
        """Returns the disks of the definition, with the server and the rate limit."""
        if self.disk is None:
            return []
        how = ["server = true"] if self.cache == "server" else [QEMUS_OWN, f'cache = "{self.cache}"']
        rate = [] if self.bytes_per_s is None else [f'bps = "{self.bytes_per_s}B"']
        paths = [self.disk, self.data_disk] if self.data else [self.disk]
        return [line for path in paths for line in ("[[disk]]", f"path = {json.dumps(str(path))}", *how, *rate)]

    def write(self, folder: Path, qemu: str) -> Path:
        """Writes the definition, and copies the disk; afterwards the host caches nothing of the disk."""
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
        """Mounts the disk with XFS, if the guest has one."""
        if self.data:
            self.ssh("modprobe xfs && mount /dev/vdb /mnt")

    def ssh(self, command: str) -> str:
        """Runs a command in the guest, and returns its output."""
        return in_guest(self, command)


@dataclass
class CacheEnvironment(Environment):
    """The environment of the warm-cache benchmark: guests with caches, on a disk whose rates can be limited."""

    slow: Slow | None = None
    """Disk with limits for the guests' disks; `None` if the kernel cannot limit a disk."""

    def cached(self, name: str, memory_mib: int, index: int, cache: str = "server") -> CacheGuest:
        """Returns a guest with its files in this environment."""
        self.need(memory_mib=int(memory_mib * 1.1) + 512)
        folder = self.slow.folder if self.slow else self.disk_dir
        image = self.image(IMAGE)
        return CacheGuest(
            name,
            image=image,
            memory_mib=memory_mib,
            index=index,
            touch=None,
            netns=self.netns,
            ram_dir=self.ram_dir,
            disk_dir=folder,
            cache=cache,
        )

    def limit_rates(self, limit: str | None) -> None:
        """Limits the disk to the rates of `limit`, or removes the limit."""
        if self.slow is None:
            raise NoRoomError("has no block I/O controller of control groups v1, so no disk can be limited")
        self.slow.limit_rates(LIMITS[limit] if limit else None)

    @contextmanager
    def limited(self, limit: str) -> Iterator[None]:
        """Limits the disk while the body runs."""
        self.limit_rates(limit)
        try:
            yield
        finally:
            self.limit_rates(None)

    @contextmanager
    def on_limited_disk(self, guest: CacheGuest, limit: str) -> Iterator[CacheGuest]:
        """Runs a guest whose disk is limited while the body runs. The guest boots without the limit."""
        self.limit_rates(None)
        with self.ours(guest), self.limited(limit):
            yield guest

    def from_retained_cache(self, guest: CacheGuest) -> int:
        """Returns the bytes that the guest has read from its retained cache; 0 after a cold reboot."""
        total = 0
        for disk in ("disk0", "disk1") if guest.data else ("disk0",):
            control = self.rekindle.run_dir / guest.name / f"disk-{disk}.control"
            status = self.rekindle.call("disk", "status", str(control))
            # `attic`: blocks still retained, and counts of the others. `emptied`: the counts once none is retained.
            counts = status["attic"][1] if status["attic"] else status["emptied"]
            total += counts["served"] * BLOCK_BYTES if counts else 0
        return total

    def reboot(self, guest: CacheGuest, how: str) -> dict[str, object]:
        """Reboots the guest and waits until all of its services answer again."""
        report = self.rekindle.call("reboot", guest.name, "--how", how)
        guest.wait_ready()
        guest.mount()
        return report


@contextmanager
def environment(setup: Setup, *, slow: bool = True) -> Iterator[CacheEnvironment]:
    """Sets up the environment: folders, a tmpfs for guest RAM, a network namespace, a disk.

    `slow`: whether to make a disk that the kernel limits, where possible.
    """
    with ExitStack() as stack:
        space = stack.enter_context(setup.workspace())
        can_limit = slow and can_be_slow()
        limited_disk = stack.enter_context(slow_disk(space.disk / "slow", SLOW_DISK_MIB)) if can_limit else None
        yield setup.environment(CacheEnvironment, space, slow=limited_disk)
