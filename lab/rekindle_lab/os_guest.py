"""Defines a guest whose operating system is rebooted: its definition, disk and phases, and commands in it.

Phases are the points of its boot (kernel up, services up) at which the guest saves a snapshot, the phase's candidate. A
reboot can resume from a candidate instead of booting.
"""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rekindle_lab import guests
from rekindle_lab.guests import Guest, Image
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.slow import run

SSH_DEADLINE_S = 300.0
"""Deadline for a command in the guest."""
SAVED_DEADLINE_S = 120.0
"""Deadline for the candidates of all phases to be saved after a boot."""
PHASES = {"micro": ("kernel", "services"), "debian": ("kernel",), "immutable": ("kernel", "services")}
"""Phases that can have candidates, by guest."""
PATHS = {"micro": "/bytes/16384"}
"""The requested page, of 16 KiB: served by micro's own server, or by nginx in other guests."""
MICRO_DISK_BYTES = 16 << 20
SECTOR_BYTES = 512
PARTITION_START_SECTOR = 2048
"""First sector of the partition on debian's disk: 1 MiB, as partitioning tools choose it."""


@dataclass(frozen=True)
class OsGuest(Guest):
    """A guest that is rebooted. Rekindle's disk servers have the guest's disks."""

    SHUTDOWN_TIMEOUT: ClassVar[str] = "2m"

    kind: str = "micro"
    """`micro`, `debian`, `immutable`."""
    phases: bool = False
    """Whether phases of the guest's boot are kept.

    A boot takes longer with phases, so each way without phases is measured with another guest.
    """
    firmware: Path | None = None
    """File that receives the output of the firmware's debug port."""

    @property
    def path(self) -> str:
        """The path that a client requests."""
        return PATHS.get(self.kind, "/files/000.bin")

    @property
    def own_disk(self) -> Path:
        """The disk that the guest writes."""
        return self.disk_dir / f"{self.name}.raw"

    @property
    def disk(self) -> Path | None:
        """The disk file that is removed at the end."""
        return self.own_disk

    @property
    def command_line(self) -> str:
        """Kernel command line of the guest."""
        root = {
            "micro": "",
            "debian": "root=/dev/vda1 rw ",
            "immutable": "root=/dev/vda ro rekindle.overlay=50% rekindle.data=/dev/vdb1 ",
        }[self.kind]
        return f"{root}{guests.KERNEL_WORDS} rekindle.ip={self.address}/24 rekindle.tick=0"

    def disk_lines(self) -> list[str]:
        """Returns the disks of the VM definition."""
        own_disk = ["[[disk]]", f"path = {json.dumps(str(self.own_disk))}", "server = true"]
        if self.kind != "immutable":
            return own_disk
        shared = json.dumps(str(self.image.folder / "disk.raw"))
        return ["[[disk]]", f"path = {shared}", "readonly = true", "server = true", *own_disk]

    def qemu_args(self) -> list[str]:
        """Returns the QEMU arguments for the firmware's debug port."""
        return debug_port(self.firmware) if self.firmware else []

    def definition(self, qemu: str) -> str:
        """Returns the VM definition, with the phases that are kept."""
        text = super().definition(qemu)
        return f"{text}\n[phase]\nsave = {json.dumps(PHASES[self.kind])}\n" if self.phases else text

    def write(self, folder: Path, qemu: str) -> Path:
        """Writes the definition, and makes the disk that the guest writes."""
        make_disk(self.kind, self.image, self.own_disk)
        path = folder / f"{self.name}.toml"
        path.write_text(self.definition(qemu))
        return path

    def ssh(self, command: str, given: bytes = b"") -> str:
        """Runs a command in the guest, with `given` as its input, and returns its output."""
        words = self.ssh_command(command)
        completed = subprocess.run(words, input=given, capture_output=True, timeout=SSH_DEADLINE_S, check=False)
        if completed.returncode != 0:
            error = (completed.stderr.strip() or completed.stdout.strip())[-1000:].decode(errors="replace")
            raise RekindleError(f"{self.name}: {command[:80]}: exit status {completed.returncode}: {error}")
        return completed.stdout.decode()


def make_disk(kind: str, image: Image, path: Path) -> None:
    """Makes the disk that a guest writes.

    debian's root gets a partition: every firmware reads the first block of a disk. If that block were part of a file
    system, no candidate of a phase would ever be usable.
    """
    if kind == "micro":
        with path.open("wb") as file:
            file.truncate(MICRO_DISK_BYTES)
    elif kind == "immutable":
        guests.copy_sparse(image.folder / "data.raw", path)
    else:
        source = image.folder / "disk.raw"
        sectors = source.stat().st_size // SECTOR_BYTES
        run("dd", f"if={source}", f"of={path}", "bs=1M", "seek=1", "conv=sparse", "status=none")
        # The first entry of a DOS partition table: not bootable; start, type 0x83 (Linux) and end, both places given
        # as beyond cylinders; then start and length in sectors.
        entry = bytes([0, 0xFE, 0xFF, 0xFF, 0x83, 0xFE, 0xFF, 0xFF])
        entry += PARTITION_START_SECTOR.to_bytes(4, "little") + sectors.to_bytes(4, "little")
        with path.open("r+b") as file:
            file.truncate((PARTITION_START_SECTOR + sectors) * SECTOR_BYTES)
            file.seek(446)  # of the table in the first sector
            file.write(entry)
            file.seek(510)
            file.write(b"\x55\xaa")  # the sector's signature


def debug_port(path: Path) -> list[str]:
    """Returns QEMU's arguments that make the firmware's debug port a file."""
    return ["-chardev", f"file,id=firmware,path={path}", "-device", "isa-debugcon,iobase=0x402,chardev=firmware"]


def wait_saved(rekindle: Rekindle, guest: OsGuest) -> None:
    """Waits until each phase has a usable candidate. Makes micro announce the later phase."""
    deadline = time.monotonic() + SAVED_DEADLINE_S
    if guest.kind == "micro":
        guest.command("phase services")
    while True:
        unusable = {phase["name"]: phase["void"] for phase in rekindle.show(guest.name)["phases"] if phase["void"]}
        if not unusable:
            return
        if time.monotonic() > deadline:
            raise RekindleError(f"{guest.name}: phases that are not saved: {unusable}")
        time.sleep(0.1)


def ask_often(namespace: str) -> None:
    """Makes the kernel repeat ARP requests every 20 ms instead of every second, which would be measured as downtime."""
    words = "for file in /proc/sys/net/ipv4/neigh/*/retrans_time_ms; do echo 20 >$file; done"
    run("ip", "netns", "exec", namespace, "sh", "-c", words)
