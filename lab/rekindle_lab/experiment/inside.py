"""Takes samples inside a debian guest over ssh: CPU, load, free memory and I/O, as in table 2 of the paper.

One ssh session stays open for all samples: a login takes an emulated processor a second, which would count for the
window.
"""

import os
import select
import subprocess
import time
from typing import Any, Self

from rekindle_lab.os_guest import OsGuest

END_OF_SAMPLE = "that-is-all"
SAMPLE_COMMAND = "cat /proc/loadavg; head -1 /proc/stat; grep -E '^(MemFree|Buffers|Cached|Slab):' /proc/meminfo; "
SAMPLE_COMMAND += f"grep -E '^pgpg(in|out) ' /proc/vmstat; echo {END_OF_SAMPLE}\n"
SAMPLE_DEADLINE_S = 60.0


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

    def take(self) -> dict[str, Any]:
        """Takes a sample: times in units of the guest's clock ticks, memory in KiB, pages in and out in KiB."""
        assert self._shell is not None and self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(SAMPLE_COMMAND.encode())
        self._shell.stdin.flush()
        output, deadline = b"", time.monotonic() + SAMPLE_DEADLINE_S
        while not output.endswith(f"{END_OF_SAMPLE}\n".encode()):
            ready, _, _ = select.select([self._shell.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            data = os.read(self._shell.stdout.fileno(), 65536) if ready else b""
            if not data:
                what = "ended" if ready else f"no more output within {SAMPLE_DEADLINE_S:g} s"
                raise RuntimeError(f"{self.guest.name}: ssh: {what}: {output[-500:].decode(errors='replace')}")
            output += data
        return parse(output.decode())

    @staticmethod
    def responses(samples: list[dict[str, Any]]) -> dict[str, float]:
        """Returns the responses of a window: averages of load and free memory, totals of CPU and I/O."""
        in_guest = [sample["guest"] for sample in samples]
        first, last = in_guest[0], in_guest[-1]
        ticks = last["ticks"] - first["ticks"]
        busy = ticks - (last["idle_ticks"] - first["idle_ticks"])
        return {
            "guest_cpu_pct": 100 * busy / ticks if ticks else 0.0,
            "guest_load": sum(sample["load_15min"] for sample in in_guest) / len(in_guest),
            "guest_free_kib": sum(sample["free_kib"] for sample in in_guest) / len(in_guest),
            "guest_io_blocks": float(last["paged_kib"] - first["paged_kib"]),
        }


def parse(text: str) -> dict[str, Any]:
    """Parses the output of `SAMPLE_COMMAND`. Free memory includes buffers and caches, as in the paper."""
    lines = [line for line in text.splitlines() if line != END_OF_SAMPLE]
    cpu = [int(word) for word in lines[1].split()[1:]]
    numbers = {key.rstrip(":"): int(value.split()[0]) for key, _, value in (line.partition(" ") for line in lines[2:])}
    return {
        "load_15min": float(lines[0].split()[2]),
        "ticks": sum(cpu[:8]),
        "idle_ticks": cpu[3] + cpu[4],
        "free_kib": numbers["MemFree"] + numbers["Buffers"] + numbers["Cached"],
        "slab_kib": numbers["Slab"],
        "paged_kib": numbers["pgpgin"] + numbers["pgpgout"],
    }
