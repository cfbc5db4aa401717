"""The stage of this topic: a disk that is held to a rate, and guests on it that are rebooted."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab import guests, netns
from rekindle_lab.bench import stage as bench
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.guests import Guest
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.slow import Slow, can_be_slow, slow_disk
from rekindle_lab.stores import forget

from .plan import LIMITS

IMAGE = "debian-cache"
SSH_DEADLINE_S = 900.0


@dataclass(frozen=True)
class CacheGuest(Guest):
    """A guest with the files, the database and the web server of this topic."""

    cache: str = "server"
    """`server`: Rekindle's own; `writeback`, `none`: QEMU's; a path: the socket of one that was started by hand."""

    @property
    def disk(self) -> Path | None:
        """Its own copy of the image's disk; one of a server by hand is that server's."""
        return None if self.cache.startswith("/") else self.disk_dir / f"{self.name}.raw"

    def definition(self, qemu: str) -> str:
        """Its VM definition in TOML, for this QEMU binary."""
        append = f"root=/dev/vda rw console=ttyS0 quiet rekindle.ip={self.address}/24 rekindle.tick=0"
        lines = [
            f"name = {json.dumps(self.name)}",
            f'memory = "{self.memory_mib}M"',
            f"qemu = {json.dumps(qemu)}",
            'shutdown_timeout = "5m"',
        ]
        if self.disk is None:
            chardev = f"socket,id=byhand,path={self.cache},reconnect=1"
            lines.append(
                f'qemu_args = ["-chardev", {json.dumps(chardev)}, "-device", "vhost-user-blk-pci,chardev=byhand"]'
            )
        lines += ["[ram]", f"dir = {json.dumps(str(self.ram_dir))}", "[boot]"]
        lines += [f"kernel = {json.dumps(str(self.image.folder / 'vmlinuz'))}"]
        lines += [f"initrd = {json.dumps(str(self.image.folder / 'initrd'))}", f"append = {json.dumps(append)}"]
        if self.disk is not None:
            how = "server = true" if self.cache == "server" else f'cache = "{self.cache}"'
            lines += ["[[disk]]", f"path = {json.dumps(str(self.disk))}", how]
        lines += ["[[net]]", 'kind = "tap"', f"netns = {json.dumps(self.netns)}"]
        return "\n".join([*lines, f"address = {json.dumps(self.host_address)}", ""])

    def write(self, folder: Path, qemu: str) -> Path:
        """Write the definition, and copy the disk, of which the host caches nothing then."""
        path = folder / f"{self.name}.toml"
        path.write_text(self.definition(qemu))
        if self.disk is not None:
            guests.copy_sparse(self.image.folder / "disk.raw", self.disk)
            forget(self.disk)
        return path

    def ssh(self, command: str) -> str:
        """Run a command in it, and give what it says."""
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

    def reboot(self, guest: CacheGuest, how: str) -> dict[str, object]:
        """Reboot the guest and wait until it is well again."""
        told = self.rekindle.call("reboot", "os", guest.name, "--how", how)
        guest.wait_ready()
        return told


@contextmanager
def stage(root: Path, binary: Path, qemu: str, rows: RowFile, disk: Path) -> Iterator[Stage]:
    """Set the stage: folders, a tmpfs for guest RAM, a network namespace, a disk. `disk`: a folder on a real one."""
    with ExitStack() as stack:
        at = stack.enter_context(bench.folders(disk))
        name = stack.enter_context(netns.namespace(f"rkb{os.getpid()}"))
        slow = stack.enter_context(slow_disk(at.disk_dir / "slow", 12288)) if can_be_slow() else None
        rekindle = Rekindle(binary, at.work / "run")
        yield Stage(root, rekindle, qemu, rows, at.work, at.ram_dir, at.disk_dir, name, slow=slow)
