"""The case: the server of a disk is killed under load repeatedly, and is restarted automatically."""

import json
import os
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.rekindle import RekindleError

from .cache_guests import CacheEnvironment, CacheGuest
from .plan import Plan
from .rows import Row

BACK_DEADLINE_S = 60.0
POLL_S = 0.001
"""Seconds between two queries to the server."""
SPAN_MIB = 32
"""Size of the area that the guest writes and verifies, in MiB."""


@dataclass(frozen=True)
class Verified:
    """Result of the guest's load."""

    bytes_read: int
    errors: int


def verify(guest: CacheGuest, seconds: int) -> Verified:
    """Writes to the disk for `seconds`, reads the data back and verifies it."""
    path = guest.file if guest.stands_in else "/srv/verify"
    words = f"fio --name=x --filename={path} --size={SPAN_MIB << 20} --bs=4096 --rw=randwrite --direct=1"
    words += " --ioengine=libaio --iodepth=8 --verify=crc32c --verify_backlog=256 --continue_on_error=verify"
    words += f" --time_based --runtime={seconds} --thread --output-format=json || true"
    output = guest.ssh(words)
    if "{" not in output:
        raise RekindleError(f"{guest.name}: fio has printed no result: {output!r}")
    job = json.loads(output[output.index("{") :])["jobs"][0]
    if job["read"]["io_bytes"] == 0:
        raise RekindleError(f"{guest.name}: fio has verified nothing")
    return Verified(job["read"]["io_bytes"], int(job["error"] != 0) + job.get("total_err", 0))


def is_served(control: Path) -> bool:
    """Returns whether a server answers on the socket `control` and serves the queues of a QEMU."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(control))
            connection.sendall(b'{"command": "status"}\n')
            with connection.makefile() as answers:
                return bool(json.loads(answers.readline())["return"]["active"])
    except (OSError, ValueError, KeyError):
        return False


def kill(env: CacheEnvironment, guest: CacheGuest) -> int:
    """Kills the server of the guest's disk. Returns the microseconds until another one serves the guest."""
    shown = env.rekindle.show(guest.name)["helpers"]
    pid = next((helper["pid"] for helper in shown if helper["helper"] == "disk:disk0"), None)
    if pid is None:
        raise RekindleError(f"{guest.name}: the server of its disk is missing: {shown}")
    control = env.rekindle.run_dir / guest.name / "disk-disk0.control"
    began = time.monotonic_ns()
    os.kill(pid, signal.SIGKILL)
    while not is_served(control):
        if time.monotonic_ns() - began > BACK_DEADLINE_S * 1e9:
            raise RekindleError(f"{guest.name}: its disk is not served again {BACK_DEADLINE_S:.0f} s after the kill")
        time.sleep(POLL_S)
    return (time.monotonic_ns() - began) // 1000


def helper_back(env: CacheEnvironment, plan: Plan) -> None:
    """Kills the server under a load that verifies the data that it reads."""
    if env.slow:
        env.limit_rates(None)
    seconds = round(plan.kills * (plan.kill_every_s + 1)) + 5
    with env.ours(env.cached("helper", 768, 8)) as guest, ThreadPoolExecutor(1) as pool:
        load: Future[Verified] = pool.submit(verify, guest, seconds)
        for number in range(plan.kills):
            time.sleep(plan.kill_every_s)
            if load.done():
                break
            row = Row(
                case="helper",
                what="kill",
                how="server",
                limit="none",
                round=number,
                memory_mib=guest.memory_mib,
                us=kill(env, guest),
            )
            env.rows.append(row)
        verified = load.result()
        totals = {"bytes": verified.bytes_read, "errors": verified.errors}
        env.rows.append(
            Row(
                case="helper", what="verify", how="server", limit="none", round=0, memory_mib=guest.memory_mib, **totals
            )
        )
        env.log(f"helper: {plan.kills} kills, {verified.errors} errors in {verified.bytes_read} bytes")
