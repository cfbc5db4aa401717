"""The cases `native` and `attic`: disk servers without a guest, with one client at native speed.

The servers are Rekindle's and QEMU's storage daemon (`qsd`). The client is an example program of the crate `disk`.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_bench.case import NoRoomError
from rekindle_bench.environment import MIB
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.slow import loop_device

from .cache_guests import CacheEnvironment
from .plan import Plan
from .rows import Row

START_DEADLINE_S = 30.0
PEERS = {"qsd": "io_uring", "qsd-native": "native", "qsd-threads": "threads"}
"""Ways of the storage daemon to access a device. Each window is measured with all of them, and the best one counts."""


@dataclass(frozen=True)
class Kind:
    """A kind of request that the client sends."""

    what: str
    order: str
    block: int
    """Bytes per request."""
    depth: int
    """Requests that are under way at a time."""


KINDS = (
    Kind("read", order="random", block=4096, depth=32),
    Kind("read", order="in-order", block=1 << 20, depth=8),
    Kind("write", order="random", block=4096, depth=32),
    Kind("write", order="in-order", block=1 << 20, depth=8),
)


@dataclass(frozen=True)
class Server:
    """A running disk server."""

    socket: Path
    pid: int

    def used_us(self) -> int:
        """Returns the processor time that the server and its threads, also ended ones, have used, in microseconds."""
        # The clock of a process, as clock_getcpuclockid(3) makes its number.
        return time.clock_gettime_ns(~self.pid << 3 | 2) // 1000


@contextmanager
def _process(command: list[str], socket: Path, log: Path) -> Iterator[Server]:
    """Starts a server and waits for its socket. The server ends with the body, or with this process."""
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
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


def ours(env: CacheEnvironment, image: Path, name: str = "ours", *options: str) -> AbstractContextManager[Server]:
    """Starts Rekindle's disk server."""
    socket = env.work / f"{name}.sock"
    command = [str(env.rekindle.binary), "disk", "serve", str(image), "--socket", str(socket), *options]
    return _process(command, socket, env.work / f"{name}.log")


def daemon(env: CacheEnvironment, device: Path, aio: str) -> AbstractContextManager[Server]:
    """Starts QEMU's storage daemon, with a polling thread for the disk, and direct I/O as in Rekindle's server."""
    binary = shutil.which("qemu-storage-daemon")
    if binary is None:
        raise NoRoomError("has no qemu-storage-daemon; run: scripts/setup")
    socket = env.work / "qsd.sock"
    export = f"type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={socket},writable=on,iothread=t"
    blockdev = f"driver=host_device,node-name=f,filename={device},cache.direct=on,aio={aio}"
    command = [binary, "--object", "iothread,id=t", "--blockdev", blockdev, "--export", export]
    return _process(command, socket, env.work / "qsd.log")


def run_client(env: CacheEnvironment, server: Server, kind: Kind, span_mib: int, *options: str) -> dict[str, int]:
    """Runs the client on the first `span_mib` of the server's disk; returns its report."""
    client = env.rekindle.binary.parent / "examples" / "native"
    command = [str(client), str(server.socket), "--what", kind.what, "--order", kind.order, "--bytes", str(kind.block)]
    command += ["--depth", str(kind.depth), "--span", str(span_mib * MIB), "--server", str(server.pid), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode != 0:
        raise RekindleError(f"native: {result.stderr.strip()[:1000]}")
    return json.loads(result.stdout)


def _row(what: Kind, how: str, round_number: int, report: dict[str, int]) -> Row:
    columns = {"bytes": report["bytes"], "us": report["ns"] // 1000, "cpu_us": report["server_cpu_ns"] // 1000}
    return Row(
        case="native",
        what=what.what,
        how=how,
        limit="none",
        round=round_number,
        block=what.block,
        requests=report["requests"],
        **columns,
    )


@contextmanager
def medium(env: CacheEnvironment, span_mib: int) -> Iterator[Path]:
    """Makes a block device in memory, whose access times vary less than those of a disk."""
    env.need(memory_mib=4 * span_mib)
    if not Path("/dev/loop-control").exists():
        raise NoRoomError("has no loop devices")
    path = env.work / "native.raw"
    try:
        subprocess.run(["dd", "if=/dev/urandom", f"of={path}", "bs=1M", f"count={span_mib}", "status=none"], check=True)
        with loop_device(path) as device:
            # From now on only the device keeps the file, so that its memory is freed when the device is removed.
            path.unlink()
            yield Path(device)
    finally:
        path.unlink(missing_ok=True)


def native(env: CacheEnvironment, plan: Plan) -> None:
    """Measures windows with each server in turn."""
    ways = ("server", *PEERS)
    with medium(env, plan.span_mib) as device:
        for round_number in range(plan.native_windows):
            for how in ways if round_number % 2 == 0 else ways[::-1]:
                with daemon(env, device, PEERS[how]) if how in PEERS else ours(env, device) as server:
                    for kind in KINDS:
                        report = run_client(env, server, kind, plan.span_mib, "--seconds", str(plan.native_s))
                        env.rows.append(_row(kind, how, round_number, report))
            env.log(f"native: {round_number + 1} of {plan.native_windows}")


def retained(env: CacheEnvironment, plan: Plan) -> None:
    """Reads all blocks, then reads all again from the retained cache: into used buffers, or untouched memory."""
    kind = KINDS[1]
    every = ("--requests", str(plan.span_mib * MIB // kind.block))
    with medium(env, plan.span_mib) as device, ours(env, device) as server:
        control = f"{server.socket}.control"
        for round_number in range(plan.retained_reads):
            for how, option in (("attic", "--reuse"), ("attic-fresh", "--fresh")):
                run_client(env, server, kind, plan.span_mib, *every)
                _idle(env, control)
                env.rekindle.call("disk", "keep", control)
                report = run_client(env, server, kind, plan.span_mib, *every, option)
                _idle(env, control)
                status = env.rekindle.call("disk", "status", control)
                served = (status["attic"] or [0, status["emptied"]])[1]["served"]
                if served * 4096 != report["bytes"]:
                    raise RekindleError(f"{served} blocks came from the retained cache, not {report['bytes'] // 4096}")
                env.rekindle.call("disk", "drop", control)
                env.rows.append(_row(kind, how, round_number, report))
        env.log(f"attic: {plan.retained_reads}")


def _idle(env: CacheEnvironment, control: str) -> None:
    """Waits until no client is connected."""
    deadline = time.monotonic() + START_DEADLINE_S
    while env.rekindle.call("disk", "status", control)["connected"]:
        if time.monotonic() > deadline:
            raise RekindleError(f"{control}: its client does not disconnect")
        time.sleep(0.01)
