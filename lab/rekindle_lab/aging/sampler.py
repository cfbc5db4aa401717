"""Writes samples of this host, and of the QEMU processes of its guests, until it is ended."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from rekindle_lab.aging.samples import FORMAT
from rekindle_lab.experiment.sampling import process

PROC = Path("/proc")


def host(proc: Path = PROC) -> dict[str, Any]:
    """What a host has left. Free memory is what is available, caches included."""
    memory = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        memory[name] = int(value.split()[0])
    opened, _, most = (proc / "sys/fs/file-nr").read_text().split()
    swap = memory["SwapTotal"]
    sample = {
        "free_memory_kib": memory["MemAvailable"],
        "slab_kib": memory["Slab"],
        "slab_kib_limit": memory["MemTotal"],
        "open_files": int(opened),
        "open_files_limit": int(most),
    }
    return sample | ({"swap_used_kib": swap - memory["SwapFree"], "swap_used_kib_limit": swap} if swap else {})


def boot(proc: Path = PROC) -> str:
    """Names the host's boot."""
    return (proc / "sys/kernel/random/boot_id").read_text().strip()


def guest(pid: int, proc: Path = PROC) -> dict[str, Any] | None:
    """What a guest's QEMU takes; `None` once it has ended. A new process is a new boot."""
    found = process(pid)
    if found is None:
        return None
    try:
        files = len(list((proc / str(pid) / "fd").iterdir()))
        limits = (proc / str(pid) / "limits").read_text()
    except OSError:
        return None
    most = next(line.split()[3] for line in limits.splitlines() if line.startswith("Max open files"))
    sample = {"resident_kib": found["resident_kib"], "open_files": files}
    return sample | ({} if most == "unlimited" else {"open_files_limit": int(most)})


def response_ms(url: str, timeout_s: float) -> float | None:
    """How long an answer takes; `None` if none comes: a service that is away is no slow one."""
    began = time.monotonic()
    try:
        with urlopen(url, timeout=timeout_s) as answer:
            answer.read()
    except (URLError, OSError, TimeoutError):
        return None
    return (time.monotonic() - began) * 1e3


def take(guests: dict[str, int], urls: dict[str, str], timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """One sample of the host and one of each guest. `guests`: pids by name; `urls`: services by guest's name."""
    common = {"format": FORMAT, "host": socket.gethostname(), "unix_s": round(time.time(), 3)}
    found = [{**common, "guest": None, "boot": boot(), **host()}]
    for name, pid in guests.items():
        own = guest(pid)
        if own is None:
            continue
        answer = response_ms(urls[name], timeout_s) if name in urls else None
        if answer is not None:
            own["response_time_ms"] = round(answer, 3)
        found.append({**common, "guest": name, "boot": f"{boot()}/{pid}", **own})
    return found


def write(
    path: Path, guests: Callable[[], dict[str, int]], urls: dict[str, str], every_s: float, most: int | None
) -> int:
    """Append samples, each made last at once, `most` times or until interrupted; gives how many times."""
    count = 0
    with path.open("a") as file:
        due = time.monotonic()
        while most is None or count < most:
            for sample in take(guests(), urls):
                file.write(json.dumps(sample) + "\n")
            file.flush()
            os.fsync(file.fileno())
            count += 1
            due += every_s
            if most is None or count < most:
                time.sleep(max(0.0, due - time.monotonic()))
    return count
