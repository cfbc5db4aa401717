"""Makes disks whose rates the kernel limits: an ext4 file system on a loop device with the block I/O controller."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

THROTTLE = Path("/sys/fs/cgroup/blkio")
"""Block I/O controller of control groups v1. Limits of its root hold for the whole machine, also when the kernel writes
back later. Control groups v2 have no limits at the root."""


@dataclass(frozen=True)
class Limit:
    """Rate limits of a disk, for reading and for writing each."""

    bytes_per_s: int
    operations_per_s: int | None = None


@dataclass(frozen=True)
class Slow:
    """A loop device with ext4 on it."""

    folder: Path
    """Mount point of the file system."""
    device: str
    """Numbers of the device, as `7:3`."""

    def limit_rates(self, limit: Limit | None) -> None:
        """Limits the disk's rates, or removes the limits."""
        bytes_per_s = limit.bytes_per_s if limit else 0  # 0: no limit
        operations_per_s = limit.operations_per_s or 0 if limit else 0
        for unit, rate in (("bps", bytes_per_s), ("iops", operations_per_s)):
            for direction in ("read", "write"):
                (THROTTLE / f"blkio.throttle.{direction}_{unit}_device").write_text(f"{self.device} {rate}")


def can_be_slow() -> bool:
    """Returns whether this machine can limit the rates of a disk."""
    return (THROTTLE / "blkio.throttle.write_bps_device").exists()


@contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """Makes a loop device on a file, for direct I/O. The device is removed with its last user, even after a kill."""
    device = run("losetup", "--find", "--show", "--direct-io=on", image)
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    finally:
        # The kernel detaches an open device only when the device is closed for the last time.
        run("losetup", "--detach", device)
    try:
        yield device
    finally:
        os.close(descriptor)


@contextmanager
def slow_disk(folder: Path, size_mib: int) -> Iterator[Slow]:
    """Makes a disk whose rates can be limited: a loop device on a file in `folder`, which is on the machine's disk.

    QEMU's storage daemon with its throttle, behind FUSE and a loop device, cannot be used: QEMU 10.0 mixes up the data
    of concurrent writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image, mount = folder / "disk.raw", folder / "mount"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with image.open("wb") as file:
            file.truncate(size_mib << 20)
        run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        mount.mkdir()
        loop = stack.enter_context(loop_device(image))
        number = Path(loop).stat().st_rdev
        slow = Slow(mount, f"{os.major(number)}:{os.minor(number)}")
        run("mount", "-t", "ext4", loop, mount)
        stack.callback(subprocess.run, ["umount", str(mount)], check=False)
        stack.callback(slow.limit_rates, None)
        yield slow


def run(*command: str | Path) -> str:
    """Runs a program and returns its output."""
    completed = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        output = (completed.stderr or completed.stdout).strip()[-1000:]
        raise OSError(f"{' '.join(str(word) for word in command)}: exit status {completed.returncode}: {output}")
    return completed.stdout.strip()
