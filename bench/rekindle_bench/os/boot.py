"""The stages of a guest's boot, observed from outside, without a change to its kernel or its image.

- *Loader*: SeaBIOS writes `Booting from` to its debug port (I/O port 0x402) when it starts the loader. QEMU writes the
  port's output to a file, which this module reads every 2 ms.
- *Kernel*: the kernel's clock starts soon after the kernel was unpacked. The guest reports its uptime, which is
  subtracted from the host's clock; of several answers the fastest one counts. Unpacking belongs to the
  loader.
- *User space*: systemd reports when it began, by the kernel's clock.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.guests import Guest

POLL_S = 0.002
"""Seconds between two reads of the firmware's output: the error of the loader's start."""
STARTS_LOADER = b"Booting from"
UPTIME_QUERIES = 7
"""Number of times that the guest's uptime is queried; the fastest answer has the smallest error."""


class Firmware:
    """Waits until the firmware starts the loader, as written to the debug port.

    `host_us` is when the start was seen; `None` if it was not seen.
    """

    def __init__(self, path: Path) -> None:
        self.host_us: int | None = None
        self._path = path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            try:
                output = self._path.read_bytes()
            except FileNotFoundError:
                continue
            if STARTS_LOADER in output:
                self.host_us = time.time_ns() // 1000
                return

    def __enter__(self) -> "Firmware":
        """Starts the wait; removes the output of an earlier QEMU."""
        self._path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the wait."""
        self._stopping.set()
        self._thread.join()


@dataclass(frozen=True)
class Clock:
    """When a guest's kernel began, by the host's clock, and the uncertainty of that time."""

    host_us: int
    """Microseconds since 1970."""
    within_us: int
    """The actual time differs from `host_us` by at most this many microseconds."""


def kernel_began(guest: Guest) -> Clock:
    """Computes the start of a guest's kernel from the uptime that the guest reports."""
    estimates = []
    for _ in range(UPTIME_QUERIES):
        before = time.time_ns() // 1000
        uptime_s = float(guest.command("uptime").split()[1])
        after = time.time_ns() // 1000
        estimates.append(Clock((before + after) // 2 - round(uptime_s * 1e6), (after - before) // 2))
    return min(estimates, key=lambda clock: clock.within_us)


def user_space_after_us(output: str) -> int:
    """Parses `systemctl show -p UserspaceTimestampMonotonic`: microseconds from the kernel's start to systemd's."""
    name, separator, value = output.strip().partition("=")
    if name != "UserspaceTimestampMonotonic" or not separator:
        raise ValueError(f"systemctl did not print UserspaceTimestampMonotonic: {output[:200]!r}")
    return int(value)
