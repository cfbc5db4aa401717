"""Takes samples inside a debian guest over ssh: CPU, load, free memory and I/O, as in table 2 of the paper.

One ssh session stays open for all samples: a login takes an emulated processor a second, which would count for the
window.
"""

import os
import select
import subprocess
import time
from statistics import fmean
from typing import Self, TypedDict

from rekindle_lab.os_guest import OsGuest

END_OF_SAMPLE = "that-is-all"
SAMPLE_COMMAND = "cat /proc/loadavg; head -1 /proc/stat; grep -E '^(MemFree|Buffers|Cached|Slab):' /proc/meminfo; "
SAMPLE_COMMAND += f"grep -E '^pgpg(in|out) ' /proc/vmstat; echo {END_OF_SAMPLE}\n"
SAMPLE_DEADLINE_S = 60.0


class GuestSample(TypedDict):
    """A sample of a guest. Ticks and `paged_kib` are totals since its boot; memory is the present one."""

    load_15min: float
    ticks: int
    """Processor time of all kinds in clock ticks, also idle time."""
    idle_ticks: int
    """Part of `ticks` in which the processors were idle or waited for I/O."""
    free_kib: int
    """Free memory, with buffers and caches as in the paper."""
    slab_kib: int
    paged_kib: int
    """Read from disks and written to them."""


class GuestStatus:
    """Samples one guest, from `__enter__` to `__exit__`. A failing sample raises, so that the run fails."""

    def __init__(self, guest: OsGuest) -> None:
        self.guest = guest
        self._shell: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._shell = subprocess.Popen(
            self.guest.ssh_command("sh"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self.take()  # completes the login before the window
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._shell is not None
        self._shell.kill()
        self._shell.communicate()

    def take(self) -> GuestSample:
        """Takes a sample."""
        assert self._shell is not None and self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(SAMPLE_COMMAND.encode())
        self._shell.stdin.flush()
        output, deadline = b"", time.monotonic() + SAMPLE_DEADLINE_S
        while not output.endswith(f"{END_OF_SAMPLE}\n".encode()):
            ready, _, _ = select.select([self._shell.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            data = os.read(self._shell.stdout.fileno(), 65536) if ready else b""
            if not data:
                problem = "ended" if ready else f"no more output within {SAMPLE_DEADLINE_S:g} s"
                raise RuntimeError(f"{self.guest.name}: ssh: {problem}: {output[-500:].decode(errors='replace')}")
            output += data
        return parse(output.decode())

    @staticmethod
    def responses(samples: list[GuestSample]) -> dict[str, float]:
        """Returns the responses of a window: averages of load and free memory, totals of CPU and I/O."""
        first, last = samples[0], samples[-1]
        ticks = last["ticks"] - first["ticks"]
        busy = ticks - (last["idle_ticks"] - first["idle_ticks"])
        return {
            "guest_cpu_pct": 100 * busy / ticks if ticks else 0.0,
            "guest_load": fmean(sample["load_15min"] for sample in samples),
            "guest_free_kib": fmean(sample["free_kib"] for sample in samples),
            "guest_io_blocks": float(last["paged_kib"] - first["paged_kib"]),
        }


def parse(text: str) -> GuestSample:
    """Parses the output of `SAMPLE_COMMAND`."""
    loadavg, stat, *named_numbers = (line for line in text.splitlines() if line != END_OF_SAMPLE)
    # user, nice, system, idle, iowait, irq, softirq, steal; guest times, which follow, are part of user and nice.
    ticks = [int(word) for word in stat.split()[1:9]]
    numbers = {}
    for line in named_numbers:  # `MemFree:   1000 kB` or `pgpgin 5000`
        name, number, *_ = line.split()
        numbers[name.rstrip(":")] = int(number)
    return {
        "load_15min": float(loadavg.split()[2]),
        "ticks": sum(ticks),
        "idle_ticks": ticks[3] + ticks[4],
        "free_kib": numbers["MemFree"] + numbers["Buffers"] + numbers["Cached"],
        "slab_kib": numbers["Slab"],
        "paged_kib": numbers["pgpgin"] + numbers["pgpgout"],
    }
