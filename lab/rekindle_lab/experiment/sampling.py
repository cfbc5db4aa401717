"""Takes samples of the resource use of QEMU and of Rekindle's processes on the host, from /proc at an interval.

`Sampler` is the entry point; `Sample` is the record of one sample, which becomes part of the run's line as it is.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, TypedDict

from rekindle_lab.experiment.inside import GuestSample

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


class ProcessSample(TypedDict):
    """A process: totals since its start, and its present memory."""

    pid: int
    name: str
    cpu_s: float
    resident_kib: int
    read_bytes: int
    written_bytes: int


class HostSample(TypedDict):
    """The host."""

    load_1min: float
    available_kib: int


class Sample(TypedDict):
    """One sample; `t_s`: seconds since the start of the sampler."""

    t_s: float
    host: HostSample
    processes: list[ProcessSample]
    guest: NotRequired[GuestSample]


def sample_process(pid: int) -> ProcessSample | None:
    """Returns processor time, memory and disk traffic of a process; `None` once the process has ended."""
    folder = Path("/proc") / str(pid)
    try:
        name, _, after_name = (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = after_name.split()  # from field 3 of proc_pid_stat(5) on
        io = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return {
        "pid": pid,
        "name": name,
        "cpu_s": (int(fields[14 - 3]) + int(fields[15 - 3])) / TICKS_PER_S,  # utime, stime
        "resident_kib": int(fields[24 - 3]) * PAGE_KIB,  # rss
        "read_bytes": int(io["read_bytes"]),
        "written_bytes": int(io["write_bytes"]),
    }


def sample_host() -> HostSample:
    """Returns load and available memory of the host."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {"load_1min": os.getloadavg()[0], "available_kib": int(memory["MemAvailable"].split()[0])}


class Sampler:
    """Takes a sample at its start, every `every_s` seconds, and at its end. Used as a context manager."""

    def __init__(
        self,
        every_s: float,
        find_pids: Callable[[], list[int]],
        sample_guest: Callable[[], GuestSample] | None = None,
    ) -> None:
        """`find_pids`: the processes of a sample; `sample_guest`: returns the guest's own figures."""
        self.every_s = every_s
        self.find_pids = find_pids
        self.sample_guest = sample_guest
        self.error: Exception | None = None
        self.samples: list[Sample] = []
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def take(self) -> None:
        """Takes a sample now."""
        t_s = round(time.monotonic() - self._began, 3)
        processes = [process for process in map(sample_process, self.find_pids()) if process is not None]
        sample: Sample = {"t_s": t_s, "host": sample_host(), "processes": processes}
        if self.sample_guest:
            sample["guest"] = self.sample_guest()
        self.samples.append(sample)

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

    def responses(self) -> dict[str, float]:
        """Returns the use of all processes together from the first to the last sample: responses by name.

        A process that ended in between counts with its last sample.
        """
        first, last = self.samples[0], self.samples[-1]
        seconds = max(last["t_s"] - first["t_s"], 1e-3)

        def growth(key: str) -> float:
            """Returns by how much a total of all processes has grown."""
            at_start = {process["pid"]: process[key] for process in first["processes"]}
            at_end = {process["pid"]: process[key] for sample in self.samples for process in sample["processes"]}
            return sum(value - at_start.get(pid, 0) for pid, value in at_end.items())

        resident_kib = [sum(process["resident_kib"] for process in sample["processes"]) for sample in self.samples]
        return {
            "host_cpu_pct": 100 * growth("cpu_s") / seconds,
            "host_resident_kib": sum(resident_kib) / len(resident_kib),
            "host_read_bytes": growth("read_bytes"),
            "host_written_bytes": growth("written_bytes"),
        }
