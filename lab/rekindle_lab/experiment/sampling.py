"""Samples the resource use of QEMU and of Rekindle's processes on the host, from /proc at an interval."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


def process(pid: int) -> dict[str, Any] | None:
    """Returns processor time, memory and disk traffic of a process; `None` once the process has ended."""
    folder = Path("/proc") / str(pid)
    try:
        name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        io = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return {
        "pid": pid,
        "name": name,
        "cpu_s": (int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        "resident_kib": int(fields[21]) * PAGE_KIB,
        "read_bytes": int(io["read_bytes"]),
        "written_bytes": int(io["write_bytes"]),
    }


def host() -> dict[str, Any]:
    """Returns load and available memory of the host."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {"load_1min": os.getloadavg()[0], "available_kib": int(memory["MemAvailable"].split()[0])}


class Sampler:
    """Takes a sample at its start, every `every_s` seconds, and at its end. Used as a context manager."""

    def __init__(
        self, every_s: float, pids: Callable[[], list[int]], inside: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.every_s = every_s
        self.pids = pids
        self.inside = inside
        """Returns the guest's own figures, for each sample."""
        self.error: Exception | None = None
        self.samples: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def take(self) -> None:
        """Takes a sample now."""
        at = round(time.monotonic() - self._began, 3)
        alive = [found for pid in self.pids() if (found := process(pid)) is not None]
        guest = {"guest": self.inside()} if self.inside else {}
        self.samples.append({"t_s": at, "host": host(), "processes": alive, **guest})

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.every_s):
                self.take()
        except Exception as error:  # raised by the thread that waits for this one
            self.error = error

    def __enter__(self) -> "Sampler":
        self._began = time.monotonic()
        self.take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        self.take()

    def share(self) -> dict[str, float]:
        """Returns the use of all processes together from the first to the last sample: responses by name.

        A process that ended in between counts with its last sample.
        """
        first, last = self.samples[0], self.samples[-1]
        seconds = max(last["t_s"] - first["t_s"], 1e-3)

        def grown(key: str) -> float:
            before = {one["pid"]: one[key] for one in first["processes"]}
            seen = {one["pid"]: one[key] for sample in self.samples for one in sample["processes"]}
            return sum(value - before.get(pid, 0) for pid, value in seen.items())

        resident = [sum(one["resident_kib"] for one in sample["processes"]) for sample in self.samples]
        return {
            "host_cpu_pct": 100 * grown("cpu_s") / seconds,
            "host_resident_kib": sum(resident) / len(resident),
            "host_read_bytes": grown("read_bytes"),
            "host_written_bytes": grown("written_bytes"),
        }
