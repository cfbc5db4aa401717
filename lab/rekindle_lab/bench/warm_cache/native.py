"""Servers without a guest: ours and QEMU's storage daemon, with the same client at native speed."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.bench.stage import MIB, NoRoomError
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.slow import loop_device

from .plan import Plan
from .rows import Row
from .stage import Stage

START_DEADLINE_S = 30.0
PEERS = {"qsd": "io_uring", "qsd-native": "native", "qsd-threads": "threads"}
"""The storage daemon's ways to access a device; each window is measured with all of them, and the best one counts."""


@dataclass(frozen=True)
class Kind:
    """What the client does."""

    what: str
    order: str
    block: int
    depth: int


KINDS = (
    Kind("read", "random", 4096, 32),
    Kind("read", "in-order", 1 << 20, 8),
    Kind("write", "random", 4096, 32),
    Kind("write", "in-order", 1 << 20, 8),
)


@dataclass(frozen=True)
class Server:
    """One that runs."""

    socket: Path
    pid: int

    def used_us(self) -> int:
        """Microseconds of a processor that its threads have used."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) // 1000


@contextmanager
def _process(command: list[str], socket: Path, log: Path) -> Iterator[Server]:
    """Start a server and wait for its socket; ended at the end, or with this process."""
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RekindleError(f"{command[3]}: {log.read_text()[-1000:]}")
            time.sleep(0.02)
        yield Server(socket, process.pid)
    finally:
        process.terminate()
        process.wait()
        socket.unlink(missing_ok=True)


def ours(stage: Stage, image: Path, name: str = "ours", *options: str) -> AbstractContextManager[Server]:
    """Rekindle's server."""
    socket = stage.work / f"{name}.sock"
    command = [str(stage.rekindle.binary), "disk", "serve", str(image), "--socket", str(socket), *options]
    return _process(command, socket, stage.work / f"{name}.log")


def daemon(stage: Stage, device: Path, aio: str) -> AbstractContextManager[Server]:
    """QEMU's, with a thread of its own, which polls, and direct I/O as ours."""
    binary = shutil.which("qemu-storage-daemon")
    if binary is None:
        raise NoRoomError("has no qemu-storage-daemon; run: scripts/setup")
    socket = stage.work / "qsd.sock"
    export = f"type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={socket},writable=on,iothread=t"
    blockdev = f"driver=host_device,node-name=f,filename={device},cache.direct=on,aio={aio}"
    command = [binary, "--object", "iothread,id=t", "--blockdev", blockdev, "--export", export]
    return _process(command, socket, stage.work / "qsd.log")


def ask(stage: Stage, server: Server, kind: Kind, span_mib: int, *options: str) -> dict[str, int]:
    """Let the client do something; what it tells."""
    client = stage.rekindle.binary.parent / "examples" / "native"
    command = [str(client), str(server.socket), "--what", kind.what, "--order", kind.order, "--bytes", str(kind.block)]
    command += ["--depth", str(kind.depth), "--span", str(span_mib * MIB), "--server", str(server.pid), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise RekindleError(f"native: {done.stderr.strip()[:1000]}")
    return json.loads(done.stdout)


def _row(what: Kind, how: str, number: int, told: dict[str, int]) -> Row:
    given = {"bytes": told["bytes"], "us": told["ns"] // 1000, "cpu_us": told["server_cpu_ns"] // 1000}
    return Row("native", what.what, how, "none", number, block=what.block, requests=told["requests"], **given)


@contextmanager
def medium(stage: Stage, span_mib: int) -> Iterator[Path]:
    """A block device in memory: its own time varies less than a disk's."""
    stage.need(memory_mib=4 * span_mib)
    if not Path("/dev/loop-control").exists():
        raise NoRoomError("has no loop devices")
    path = stage.work / "native.raw"
    try:
        subprocess.run(["dd", "if=/dev/urandom", f"of={path}", "bs=1M", f"count={span_mib}", "status=none"], check=True)
        with loop_device(path) as device:
            # It is the device's alone from here on: memory that is freed with it.
            path.unlink()
            yield Path(device)
    finally:
        path.unlink(missing_ok=True)


def native(stage: Stage, plan: Plan) -> None:
    """Windows with each server in turn."""
    ways = ("server", *PEERS)
    with medium(stage, plan.span_mib) as device:
        for number in range(plan.native):
            for how in ways if number % 2 == 0 else ways[::-1]:
                with daemon(stage, device, PEERS[how]) if how in PEERS else ours(stage, device) as server:
                    for kind in KINDS:
                        told = ask(stage, server, kind, plan.span_mib, "--seconds", str(plan.native_s))
                        stage.rows.append(_row(kind, how, number, told))
            stage.say(f"native: {number + 1} of {plan.native}")


def attic(stage: Stage, plan: Plan) -> None:
    """All is read, the client goes, the next one reads it out of the attic: into buffers, or memory nobody touched."""
    kind = KINDS[1]
    every = ("--requests", str(plan.span_mib * MIB // kind.block))
    with medium(stage, plan.span_mib) as device, ours(stage, device) as server:
        control = f"{server.socket}.control"
        for number in range(plan.attic):
            for how, option in (("attic", "--reuse"), ("attic-fresh", "--fresh")):
                ask(stage, server, kind, plan.span_mib, *every)
                _idle(stage, control)
                stage.rekindle.call("disk", "keep", control)
                told = ask(stage, server, kind, plan.span_mib, *every, option)
                _idle(stage, control)
                status = stage.rekindle.call("disk", "status", control)
                served = (status["attic"] or [0, status["emptied"]])[1]["served"]
                if served * 4096 != told["bytes"]:
                    raise RekindleError(f"attic: {served} blocks came out of it, of {told['bytes'] // 4096}")
                stage.rekindle.call("disk", "drop", control)
                stage.rows.append(_row(kind, how, number, told))
        stage.say(f"attic: {plan.attic}")


def _idle(stage: Stage, control: str) -> None:
    """Wait until no client is connected."""
    deadline = time.monotonic() + START_DEADLINE_S
    while stage.rekindle.call("disk", "status", control)["connected"]:
        if time.monotonic() > deadline:
            raise RekindleError(f"{control}: its client does not go")
        time.sleep(0.01)
