"""Defines the guests of experiments: images from `tests/images/build`, VM definitions, the check that one is ready.

`build` makes an image, `Guest.write` the VM definition that `rekindle run` starts, `Guest.wait_ready` waits for its
boot. Each guest has a service for commands (`Guest.command`), and one that clients measure (`Guest.service_url`).
"""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rekindle_lab import netns

COMMAND_PORT = 7000
"""Port of a guest at which it accepts commands, such as `drop-caches`."""
WORK_PORT = 7001
"""Port of the debian-work guest at which a workload is started."""
KERNEL_WORDS = "console=ttyS0 quiet no_timer_check"
"""Kernel arguments of every guest. On a busy host an emulated timer is late. The kernel then panics during boot
("IO-APIC + timer doesn't work") unless it has `no_timer_check`, which it sets by itself under KVM."""
QEMUS_OWN = "server = false"
"""Gives QEMU the disks of these experiments: the cost of Rekindle's disk server is measured separately."""
READY_DEADLINE_S = 300.0
"""Deadline for a boot: long, since without KVM a boot can take minutes."""


def size(memory_mib: int) -> str:
    """Formats a size as `512M` or `2G`."""
    return f"{memory_mib // 1024}G" if memory_mib % 1024 == 0 else f"{memory_mib}M"


@dataclass(frozen=True)
class Image:
    """A guest image. Kinds: `micro`, `debian`, and `debian-work`, whose disk is only read."""

    kind: str
    folder: Path

    @property
    def key(self) -> Path:
        """Key of root in the debian image, for ssh."""
        return self.folder / "id_ed25519"


def build(root: Path, kind: str) -> Image:
    """Builds the image, or returns it from the cache."""
    return Image(kind, run_build(root / "tests/images/build", kind))


def run_build(*command: Path | str) -> Path:
    """Runs a script that builds an image, and returns the folder named on the last line of the script's output."""
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if completed.returncode != 0 or not completed.stdout.strip():
        raise RuntimeError(f"{' '.join(str(word) for word in command)}: exit status {completed.returncode}")
    return Path(completed.stdout.strip().splitlines()[-1])


def build_stand_in(root: Path, kind: str) -> Image:  # noqa: ARG001  # the same one for every kind
    """Builds the image that replaces the larger images in a trial: `micro` with additions."""
    return Image("micro", run_build(root / "tests/images/stand-in/build"))


@dataclass(frozen=True)
class Guest:
    """One guest of an experiment, reached over a tap in a network namespace."""

    SHUTDOWN_TIMEOUT: ClassVar[str] = "2m"

    name: str
    image: Image
    memory_mib: int
    index: int
    """Selects the guest's network: 10.88.INDEX.0/24."""
    touch: str | None
    """Memory that the guest fills before it is ready: `all`, `400M`, or `None` for nothing."""
    netns: str
    ram_dir: Path
    disk_dir: Path

    @property
    def address(self) -> str:
        """IP address of the guest."""
        return f"10.88.{self.index}.2"

    @property
    def host_address(self) -> str:
        """IP address, with prefix, of the host's end of the guest's tap."""
        return f"10.88.{self.index}.1/24"

    @property
    def disk(self) -> Path | None:
        """The guest's own copy of the image's disk; `None` if the disk is read-only or missing."""
        return self.disk_dir / f"{self.name}.raw" if self.image.kind == "debian" else None

    @property
    def echo_url(self) -> str:
        """URL of the guest's echo service."""
        return f"echo://{self.address}:7"

    @property
    def service_url(self) -> str:
        """URL of the service that the client measures: echo in micro, nginx in debian."""
        return self.echo_url if self.image.kind == "micro" else f"http://{self.address}/files/000.bin"

    @property
    def command_line(self) -> str:
        """Kernel command line of the guest."""
        words = f"{KERNEL_WORDS} rekindle.ip={self.address}/24 rekindle.tick=0"
        if self.image.kind in ("debian", "debian-cache"):
            words = f"root=/dev/vda rw {words}"
        if self.image.kind == "debian-work":
            words = f"root=/dev/vda ro rekindle.overlay=50% {words}"
        return f"{words} rekindle.touch={self.touch}" if self.touch else words

    def disk_lines(self) -> list[str]:
        """Returns the disk lines of the VM definition, if the guest has a disk."""
        if self.disk:
            return ["[[disk]]", f"path = {json.dumps(str(self.disk))}", QEMUS_OWN]
        if self.image.kind == "debian-work":
            disk = str(self.image.folder / "disk.raw")
            return ["[[disk]]", f"path = {json.dumps(disk)}", "readonly = true", QEMUS_OWN]
        return []

    def qemu_args(self) -> list[str]:
        """Returns additional arguments of QEMU."""
        return []

    def definition(self, qemu: str) -> str:
        """Returns the VM definition in TOML, for the QEMU binary `qemu`."""
        lines = [
            f"name = {json.dumps(self.name)}",
            f'memory = "{self.memory_mib}M"',
            f"qemu = {json.dumps(qemu)}",
            f"save_dir = {json.dumps(str(self.disk_dir))}",
            f'shutdown_timeout = "{self.SHUTDOWN_TIMEOUT}"',
            f"qemu_args = {json.dumps(self.qemu_args())}",
            "",
            "[ram]",
            f"dir = {json.dumps(str(self.ram_dir))}",
            "",
            "[boot]",
            f"kernel = {json.dumps(str(self.image.folder / 'vmlinuz'))}",
            f"initrd = {json.dumps(str(self.image.folder / 'initrd'))}",
            f"append = {json.dumps(self.command_line)}",
            "",
            *self.disk_lines(),
            "",
            "[[net]]",
            'kind = "tap"',
            f"netns = {json.dumps(self.netns)}",
            f"address = {json.dumps(self.host_address)}",
            "",
        ]
        return "\n".join(lines)

    def write(self, folder: Path, qemu: str) -> Path:
        """Writes the definition, and copies the disk; returns the definition's path."""
        if self.disk:
            copy_sparse(self.image.folder / "disk.raw", self.disk)
        path = folder / f"{self.name}.toml"
        path.write_text(self.definition(qemu))
        return path

    def command(self, line: str, deadline: float = READY_DEADLINE_S, port: int = COMMAND_PORT) -> str:
        """Sends a line to the guest's command port and returns the reply, within `deadline` seconds."""
        with netns.connect(self.netns, self.address, port, deadline) as connection:
            connection.settimeout(deadline)
            connection.sendall(line.encode() + b"\n")
            reply = b""
            while not reply.endswith(b"\n"):
                data = connection.recv(4096)
                if not data:
                    raise ConnectionError(f"{self.name}: command port closed after {reply!r}")
                reply += data
            return reply.decode().strip()

    def ssh_command(self, command: str) -> list[str]:
        """Returns the ssh command that runs `command` in a Debian guest."""
        options = ["-i", str(self.image.key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        options += ["-F", "none", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60"]
        return ["ip", "netns", "exec", self.netns, "ssh", *options, f"root@{self.address}", command]

    def wait_ready(self, deadline: float = READY_DEADLINE_S) -> None:
        """Waits until the guest's services answer, touched memory included, for at most `deadline` seconds."""
        end = time.monotonic() + deadline
        while True:
            try:
                reply = self.command("uptime", max(end - time.monotonic(), 1.0))
                break
            except OSError as error:  # also "no route to host", of a guest whose card does not answer yet
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.name}: not ready within {deadline:g} s") from error
                time.sleep(0.1)
        if not reply.startswith("ok"):
            raise RuntimeError(f"{self.name}: uptime: {reply}")
        for port in () if self.image.kind == "micro" else (80, 22):
            netns.connect(self.netns, self.address, port, max(end - time.monotonic(), 1.0)).close()


def copy_sparse(source: Path, target: Path) -> None:
    """Copies a disk image. Holes stay holes; a file system that can share blocks shares them."""
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(source), str(target)], check=True)
