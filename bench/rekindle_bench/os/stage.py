"""The stage of this topic: guests that are rebooted, with a client at each."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rekindle_bench import stage as bench
from rekindle_bench.rows import RowFile
from rekindle_lab import guests, netns
from rekindle_lab.guests import Guest, Image
from rekindle_lab.qmp import Qmp, QmpError
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.slow import run

from .boot import Firmware, debug_port, kernel_began, user_space_after_us
from .client import Client, Gap, longest_gap
from .rows import FROZEN, Row

IMAGE = "micro"
SSH_DEADLINE_S = 300.0
SAVED_DEADLINE_S = 120.0
SAMPLE_S = 1.0
"""Interval between two samples of a guest that does not answer."""
CONSOLE = 600
SETTLE_S = 1.0
"""How long a client asks an undisturbed guest before and after a reboot."""
PHASES = {"micro": ("kernel", "services"), "debian": ("kernel",), "immutable": ("kernel", "services")}
"""Phases that can have candidates."""
PATHS = {"micro": "/bytes/16384"}
"""The requested page: 16 KiB, of nginx or of micro's own server."""
MICRO_DISK_BYTES = 16 << 20


@dataclass(frozen=True)
class OsGuest(Guest):
    """A guest of this topic. Rekindle's servers have its disks."""

    SHUTDOWN_TIMEOUT: ClassVar[str] = "2m"

    kind: str = "micro"
    """`micro`, `debian`, `immutable`."""
    phases: bool = False
    """Whether phases of its boot are kept.

    With phases a boot takes longer, so the other ways have guests of their own.
    """
    firmware: Path | None = None
    """The file that is its firmware's debug port."""

    @property
    def path(self) -> str:
        """The path that a client requests."""
        return PATHS.get(self.kind, "/files/000.bin")

    @property
    def own_disk(self) -> Path:
        """The disk that it writes."""
        return self.disk_dir / f"{self.name}.raw"

    @property
    def disk(self) -> Path | None:
        """The file that is removed at the end."""
        return self.own_disk

    @property
    def command_line(self) -> str:
        """The command line of its kernel."""
        root = {
            "micro": "",
            "debian": "root=/dev/vda1 rw ",
            "immutable": "root=/dev/vda ro rekindle.overlay=50% rekindle.data=/dev/vdb1 ",
        }[self.kind]
        return f"{root}{guests.KERNEL_WORDS} rekindle.ip={self.address}/24 rekindle.tick=0"

    def disk_lines(self) -> list[str]:
        """Returns the disks of its VM definition."""
        own = ["[[disk]]", f"path = {json.dumps(str(self.own_disk))}", "server = true"]
        if self.kind != "immutable":
            return own
        shared = json.dumps(str(self.image.folder / "disk.raw"))
        return ["[[disk]]", f"path = {shared}", "readonly = true", "server = true", *own]

    def qemu_args(self) -> list[str]:
        """Returns the arguments of the firmware's debug port."""
        return debug_port(self.firmware) if self.firmware else []

    def definition(self, qemu: str) -> str:
        """Returns its VM definition, with the phases that are kept."""
        text = super().definition(qemu)
        return f"{text}\n[phase]\nsave = {json.dumps(PHASES[self.kind])}\n" if self.phases else text

    def write(self, folder: Path, qemu: str) -> Path:
        """Writes the definition, and makes the disk that it writes."""
        make_disk(self.kind, self.image, self.own_disk)
        path = folder / f"{self.name}.toml"
        path.write_text(self.definition(qemu))
        return path

    def ssh_command(self, command: str) -> list[str]:
        """Returns the command that runs a command in it."""
        options = ["-i", str(self.image.key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        options += ["-F", "none", "-o", "LogLevel=ERROR", "-o", "BatchMode=yes", "-o", "ConnectTimeout=60"]
        return ["ip", "netns", "exec", self.netns, "ssh", *options, f"root@{self.address}", command]

    def ssh(self, command: str, given: bytes = b"") -> str:
        """Runs a command in it, with `given` as its input, and returns its output."""
        words = self.ssh_command(command)
        done = subprocess.run(words, input=given, capture_output=True, timeout=SSH_DEADLINE_S, check=False)
        if done.returncode != 0:
            error = (done.stderr.strip() or done.stdout.strip())[-1000:].decode(errors="replace")
            raise RekindleError(f"{self.name}: {command[:80]}: exit status {done.returncode}: {error}")
        return done.stdout.decode()


def make_disk(kind: str, image: Image, path: Path) -> None:
    """Makes the disk that a guest writes.

    debian's root gets a partition: every firmware reads the first block of a disk, and with a file system there no
    candidate of a phase would ever be usable.
    """
    if kind == "micro":
        with path.open("wb") as file:
            file.truncate(MICRO_DISK_BYTES)
    elif kind == "immutable":
        guests.copy_sparse(image.folder / "data.raw", path)
    else:
        source = image.folder / "disk.raw"
        sectors = source.stat().st_size // 512
        run("dd", f"if={source}", f"of={path}", "bs=1M", "seek=1", "conv=sparse", "status=none")
        entry = bytes([0, 0xFE, 0xFF, 0xFF, 0x83, 0xFE, 0xFF, 0xFF])
        table = entry + (2048).to_bytes(4, "little") + sectors.to_bytes(4, "little")
        with path.open("r+b") as file:
            file.truncate((sectors + 2048) * 512)
            file.seek(446)
            file.write(table)
            file.seek(510)
            file.write(b"\x55\xaa")


@dataclass
class Stage(bench.Stage):
    """Everything that cases share."""

    def os_guest(
        self, kind: str, index: int, memory_mib: int, image: Image | None = None, *, phases: bool = False
    ) -> OsGuest:
        """Returns a guest. One that keeps phases has no debug port: its firmware's stage is not measured."""
        self.need(memory_mib=int(memory_mib * 1.1) + 256, disk_mib=2048)
        name = f"{kind}{index}"
        return OsGuest(
            name,
            image or self.image(kind),
            memory_mib,
            index,
            None,
            self.netns,
            self.ram_dir,
            self.disk_dir,
            kind=kind,
            phases=phases,
            firmware=None if phases else self.work / f"{name}.firmware",
        )

    def record_loss(self, guest: OsGuest, what: str) -> None:
        """Records a reboot after which the guest was not well, and boots it."""
        self.errors.append(what)
        self.log(what)
        self.rekindle.call("reboot", "os", guest.name, "--how", "cold")
        guest.wait_ready()
        if guest.phases:
            self.wait_saved(guest)

    def wait_saved(self, guest: OsGuest) -> None:
        """Waits until each phase has a usable candidate."""
        wait_saved(self.rekindle, guest)

    def _command(self, guest: OsGuest, *words: str) -> tuple[int, dict[str, Any], int]:
        """Runs the command; returns its start time, its output, and its duration."""
        began_us, began = time.time_ns() // 1000, time.monotonic()
        result = self.rekindle.call("reboot", "os", guest.name, *words)
        return began_us, result, int((time.monotonic() - began) * 1e6)

    def reboot(self, guest: OsGuest, how: str, number: int, case: str = "reboot") -> Row:
        """Reboots a guest in one way with a client at it, and returns the row. The guest is well again then."""
        words = ["--how", how]
        if phase := phase_of(how):
            words = ["--how", "phase", "--candidate", phase]
        if how.endswith(FROZEN):
            words += ["--end", "freeze"]
        row = Row(case, guest.kind, guest.memory_mib, how, number)
        booted = how in ("cold", "warm-cache")
        ask_often(guest.netns)
        with Client(guest.netns, guest.address, guest.path) as client, ExitStack() as stack:
            client.wait(10)
            time.sleep(SETTLE_S)
            firmware = stack.enter_context(Firmware(guest.firmware)) if booted and guest.firmware else None
            began_us, result, row.command_us = self._command(guest, *words)
            try:
                client.wait(10, after_host_us=max(began_us, result["resume_host_us"]))
            except RekindleError as error:
                raise RekindleError(f"{error}; {describe_hang(self.rekindle, guest)}") from error
            guest.wait_ready()
            client.wait(10)
            time.sleep(SETTLE_S)
        fill(row, result, longest_gap(client.answers, began_us))
        if firmware is not None:
            row.loader_host_us = firmware.host_us
        if booted or how == "kexec":
            row.kernel_host_us = kernel_began(guest).host_us
            if guest.kind != "micro":
                timestamp = guest.ssh("systemctl show -p UserspaceTimestampMonotonic")
                row.user_host_us = row.kernel_host_us + user_space_after_us(timestamp)
        return row


def wait_saved(rekindle: Rekindle, guest: OsGuest) -> None:
    """Waits until each phase has a usable candidate. micro is asked to announce the later one."""
    deadline = time.monotonic() + SAVED_DEADLINE_S
    if guest.kind == "micro":
        guest.command("phase services")
    while True:
        void = {phase["name"]: phase["void"] for phase in rekindle.show(guest.name)["phases"] if phase["void"]}
        if not void:
            return
        if time.monotonic() > deadline:
            raise RekindleError(f"{guest.name}: phases that are not saved: {void}")
        time.sleep(0.1)


def describe_hang(rekindle: Rekindle, guest: OsGuest) -> str:
    """Describes a guest that does not answer: two samples of its processor, and the end of its console log."""
    folder = rekindle.run_dir / guest.name
    try:
        text = (folder / "console.log").read_text(errors="replace")
        vmm = Path(json.loads((folder / "state.json").read_text())["vmm"]["directory"])
        with Qmp(vmm / "watch.sock", timeout=10.0) as qmp:
            status = qmp.execute("query-status")["status"]
            seen = [str(status)]
            for _ in range(2):
                registers = qmp.execute("human-monitor-command", {"command-line": "info registers"})
                words = [word for word in registers.split() if word.startswith(("RIP=", "RFL=", "HLT="))]
                seen.append(" ".join(words))
                time.sleep(SAMPLE_S)
    except (OSError, QmpError, ValueError, KeyError, TypeError) as error:
        return f"its QEMU cannot be queried: {error}"
    return f"QEMU: {'; '.join(seen)}; its console ends: {text[-CONSOLE:]!r}"


def phase_of(how: str) -> str:
    """Returns the phase from which a way resumes; empty for other ways."""
    return how.removeprefix("phase-").removesuffix(FROZEN) if how.startswith("phase-") else ""


def ask_often(namespace: str) -> None:
    """Makes the kernel repeat ARP requests every 20 ms, not every second: otherwise that interval would be measured."""
    words = "for file in /proc/sys/net/ipv4/neigh/*/retrans_time_ms; do echo 20 >$file; done"
    run("ip", "netns", "exec", namespace, "sh", "-c", words)


def fill(row: Row, result: dict[str, Any], gap: Gap) -> None:
    """Fills a row from the outputs of the command and the client."""
    row.silent_host_us, row.served_host_us = gap.start_host_us, gap.end_host_us
    row.gap_us, row.first_us = gap.us, gap.first_us
    row.steps = result.get("steps", [])
    if row.how != "kexec":
        row.ended_host_us, row.running_host_us = result["stop_host_us"], result["resume_host_us"]
    row.ended = result.get("ended") or ""
    phase = result.get("phase") or {}
    row.candidate, row.load_us = phase.get("candidate") or "", phase.get("load_us")
    if row.candidate != phase_of(row.how):
        skipped = phase.get("skipped")
        raise RekindleError(f"{result.get('name')}: it resumed from {row.candidate or 'nothing'}: {skipped}")


@contextmanager
def stage(root: Path, binary: Path, qemu: str, rows: RowFile, disk: Path) -> Iterator[Stage]:
    """Sets up the stage: folders, a tmpfs for guest RAM, a network namespace. `disk`: a folder on a real disk."""
    with ExitStack() as stack:
        at = stack.enter_context(bench.folders(disk))
        name = stack.enter_context(netns.namespace(f"rkb{os.getpid()}"))
        yield Stage(root, Rekindle(binary, at.work / "run"), qemu, rows, at.work, at.ram_dir, at.disk_dir, name)
