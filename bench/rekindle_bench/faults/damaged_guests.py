"""Guests of the fault experiment: their disks have Rekindle's server, their RAM is read and damaged from outside."""

import contextlib
import json
import mmap
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rekindle_bench.environment import Environment, Setup
from rekindle_lab import guests, netns
from rekindle_lab.guests import Guest, Image
from rekindle_lab.qmp import Qmp
from rekindle_lab.rekindle import Rekindle, RekindleError

from .code import KERNEL_BASE, Code
from .plan import BLOCKS, MEMORY_MIB
from .rows import read

PORT = 7002
"""Port of the experiment's program in the guest (tests/images/faults)."""
ECHO_PORT = 7
READY_S = 120.0
BLOCK_BYTES = 4096
_COMPLAINT = re.compile(r"BUG:|Oops|general protection|invalid opcode|WARNING:|Kernel panic|stack segment|double fault")


class NoAnswerError(Exception):
    """The guest does not answer."""


@dataclass(frozen=True)
class FaultGuest(Guest):
    """The guest of the experiment: image `micro-faults`, one disk."""

    SHUTDOWN_TIMEOUT: ClassVar[str] = "4s"

    @property
    def disk(self) -> Path:
        """File of the guest's disk."""
        return self.disk_dir / f"{self.name}.raw"

    @property
    def command_line(self) -> str:
        """Kernel command line, with code at fixed addresses."""
        return f"{super().command_line} nokaslr"

    def disk_lines(self) -> list[str]:
        """Returns the disk's part of the definition, with Rekindle's disk server."""
        return ["[[disk]]", f"path = {json.dumps(str(self.disk))}", "server = true"]

    def write(self, folder: Path, qemu: str) -> Path:
        """Writes the definition, and a disk whose blocks are all different."""
        self.disk.write_bytes(os.urandom(BLOCKS * BLOCK_BYTES))
        path = folder / f"{self.name}.toml"
        path.write_text(self.definition(qemu))
        return path


@dataclass
class Subject:
    """A running VM of the experiment: its guest can be asked, and its state, disk and RAM be read from outside."""

    guest: FaultGuest
    rekindle: Rekindle

    def connect(self, patience_s: float) -> socket.socket:
        """Connects to the experiment's program in the guest."""
        address = (self.guest.address, PORT)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return netns.inside(self.guest.netns, lambda: socket.create_connection(address, timeout=0.5))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise NoAnswerError(f"port {PORT} does not answer within {patience_s:g} s: {error}") from error
                time.sleep(0.02)

    def ask(self, line: str, patience_s: float = 10.0) -> str:
        """Sends a line and returns the answer. Raises `NoAnswerError` if the answer is missing or incomplete."""
        try:
            with self.connect(patience_s) as connection:
                connection.settimeout(patience_s)
                connection.sendall(line.encode() + b"\n")
                answer = b""
                while not answer.endswith(b"\n"):
                    data = connection.recv(4096)
                    if not data:
                        raise NoAnswerError(f"`{line[:40]}`: no answer")
                    answer += data
        except OSError as error:
            raise NoAnswerError(f"`{line[:40]}`: {error}") from error
        return answer.decode(errors="replace").strip()

    def receive(self, line: str, length: int | None, patience_s: float = 60.0) -> bytes:
        """Sends a line and returns the first `length` bytes of the answer; without `length`, the whole answer."""
        try:
            with self.connect(patience_s) as connection:
                connection.settimeout(patience_s)
                connection.sendall(line.encode() + b"\n")
                if length is None:
                    connection.shutdown(socket.SHUT_WR)
                parts, missing = [], length if length is not None else 1 << 30
                while missing:
                    data = connection.recv(min(missing, 1 << 20))
                    if not data:
                        break
                    parts.append(data)
                    missing -= len(data)
        except OSError as error:
            raise NoAnswerError(f"`{line[:40]}`: {error}") from error
        if length is not None and missing:
            raise NoAnswerError(f"`{line[:40]}`: {missing} of {length} bytes did not come")
        return b"".join(parts)

    def progress(self, patience_s: float) -> list[int]:
        """Returns the numbers of blocks that the guest's load has read and written, and of packets sent."""
        return [int(word) for word in self.ask("progress", patience_s).split()[1:]]

    def state(self) -> dict[str, Any]:
        """Reads Rekindle's state file of the VM. The file is replaced by a rename, so it is always complete."""
        return json.loads((self.rekindle.run_dir / self.guest.name / "state.json").read_text())

    def generation(self) -> int:
        """Returns the generation of the VM."""
        return int(self.state()["generation"])

    def qemu_alive(self) -> bool:
        """Returns whether the QEMU of this generation runs."""
        vmm = self.state()["vmm"]
        try:
            return vmm is not None and Path(f"/proc/{vmm['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def busy(self) -> bool:
        """Returns whether an operation on the VM is running."""
        return (self.rekindle.run_dir / self.guest.name / "operation.json").exists()

    def ram_file(self) -> Path:
        """Returns the guest's RAM file."""
        return Path(self.state()["hardware"]["ram"]["path"])

    def wait_ready(self) -> None:
        """Waits until the guest answers."""
        answer = self.ask("progress", READY_S)
        if not answer.startswith("ok"):
            raise RekindleError(f"{self.guest.name}: {answer}")

    def status(self) -> dict[str, Any]:
        """Returns the status of the disk server."""
        return self.rekindle.call("disk", "status", str(self.rekindle.run_dir / self.guest.name / "disk-disk0.control"))

    def console(self) -> str:
        """Returns the console output so far."""
        path = self.rekindle.run_dir / self.guest.name / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def image(self) -> np.ndarray:
        """Reads the disk past the host's page cache: an array with a row for each block."""
        length = BLOCKS * BLOCK_BYTES
        with contextlib.closing(mmap.mmap(-1, length)) as buffer:
            disk = os.open(self.guest.disk, os.O_RDONLY | os.O_DIRECT)
            try:
                filled = 0
                while filled < length:
                    count = os.preadv(disk, [memoryview(buffer)[filled:]], filled)
                    if count <= 0:
                        raise RekindleError(f"{self.guest.disk}: ends at {filled} of {length} bytes")
                    filled += count
            finally:
                os.close(disk)
            return np.frombuffer(buffer[:], dtype=np.uint64).reshape(BLOCKS, BLOCK_BYTES // 8)

    def seen(self) -> np.ndarray:
        """Reads the disk as the guest sees it, through the guest's page cache: an array with a row for each block."""
        data = self.receive(f"send vda 0 {BLOCKS}", BLOCKS * BLOCK_BYTES)
        return np.frombuffer(data, dtype=np.uint64).reshape(BLOCKS, BLOCK_BYTES // 8)

    def receive_queue(self) -> dict[str, Any]:
        """Returns the location of the network card's receive queue, as QEMU reports it."""
        directory = Path(self.state()["vmm"]["directory"])
        with Qmp(directory / "qmp.sock", timeout=10.0) as qmp:
            cards = [device for device in qmp.execute("x-query-virtio") if device["name"] == "virtio-net"]
            if not cards:
                raise RekindleError(f"{self.guest.name}: no virtio-net device")
            path = cards[0]["path"]
            return qmp.execute("x-query-virtio-queue-status", {"path": path, "queue": 0})

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Sends data to the guest's echo port and back while the body runs, for as long as the port accepts data."""
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                try:
                    with netns.connect(self.guest.netns, self.guest.address, ECHO_PORT, 0.1) as connection:
                        connection.settimeout(0.5)
                        while not ended.is_set():
                            connection.sendall(bytes(1024))
                            connection.recv(65536)
                            ended.wait(0.005)
                except OSError:
                    ended.wait(0.1)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def complaints(text: str) -> bool:
    """Returns whether a kernel has reported an error on its console."""
    return bool(_COMPLAINT.search(text))


@dataclass
class FaultEnvironment(Environment):
    """The environment of the fault experiment: guests with and without the check of digests."""

    unchecked: Rekindle | None
    """Runs the binary without the check of digests, in a run directory of its own."""
    finished: dict[tuple[str, int], int] = field(default_factory=dict)
    """Number of finished runs, by type and by whether digests were checked."""
    code: Code | None = None
    _once: threading.Lock = field(default_factory=threading.Lock)

    def fault_image(self) -> Image:
        """Returns the guest's image, built if necessary."""
        if "micro-faults" not in self.images:
            folder = guests.run_build(self.root / "tests/images/faults/build")
            self.images["micro-faults"] = guests.Image("micro-faults", folder)
        return self.images["micro-faults"]

    @contextmanager
    def subject(self, index: int, checked: int) -> Iterator[Subject]:
        """Starts a guest."""
        rekindle = self.rekindle if checked else self.unchecked
        if rekindle is None:
            raise RekindleError("there is no binary that does not check digests")
        name = f"fault{index}{'c' if checked else 'u'}"
        image = self.fault_image()
        number = 2 * index + checked
        guest = FaultGuest(
            name,
            image=image,
            memory_mib=MEMORY_MIB,
            index=number,
            touch=None,
            netns=self.netns,
            ram_dir=self.ram_dir,
            disk_dir=self.disk_dir,
        )
        definition = guest.write(self.work, self.qemu)
        subject = Subject(guest, rekindle)
        try:
            rekindle.run(definition)
            subject.wait_ready()
            self._learn(subject)
            yield subject
        finally:
            try:
                rekindle.stop(name)
            except RekindleError as error:
                if "there is no VM" not in str(error):
                    self.log(f"{name} may still be running: {error}")
            guest.disk.unlink(missing_ok=True)

    def _learn(self, subject: Subject) -> None:
        """Reads the kernel's code once, since all guests have the same kernel."""
        from .ram import Ram

        with self._once:
            if self.code is None:
                symbols, start, end = Code.span(subject.receive("cat /proc/kallsyms", None).decode())
                ram = Ram(subject.ram_file())
                self.code = Code(symbols=symbols, text=ram.read(start - KERNEL_BASE, end - start), start=start)
                ram.close()


def build_unchecked(root: Path) -> Path:
    """Returns a binary that does not check digests: `REKINDLE_UNCHECKED`, or built in a separate target directory."""
    existing = os.environ.get("REKINDLE_UNCHECKED")
    if existing:
        return Path(existing)
    target = root / "target" / "unchecked"
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--package", "rekindle"]
    command += ["--features", "unchecked-attic", "--target-dir", str(target)]
    subprocess.run(command, cwd=root, check=True)
    return target / "release" / "rekindle"


@contextmanager
def environment(setup: Setup) -> Iterator[FaultEnvironment]:
    """Sets up the environment, and builds the guest's image and the binary that does not check digests.

    `REKINDLE_UNCHECKED` in the environment: path of such a binary, which is then not built.
    """
    unchecked = build_unchecked(setup.root) if setup.plan.unchecked else None
    with setup.workspace() as space:
        without_check = Rekindle(unchecked, space.work / "unchecked") if unchecked else None
        env = setup.environment(
            FaultEnvironment, space, unchecked=without_check, finished=finished_runs(setup.rows.path)
        )
        env.fault_image()
        yield env


def finished_runs(raw: Path) -> dict[tuple[str, int], int]:
    """Counts the runs in a file of rows, by type of fault and by whether digests were checked."""
    grouped = read(raw).groupby(["kind", "checked"])
    return {(str(kind), int(checked)): len(group) for (kind, checked), group in grouped}
