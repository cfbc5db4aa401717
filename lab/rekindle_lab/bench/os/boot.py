"""The stages of a guest's boot, seen from outside, without a change to its kernel or its image.

- *Loader*: SeaBIOS says `Booting from` on its debug port (I/O port 0x402) when it hands over. The port is a file
  here, which is looked at every 2 ms.
- *Kernel*: its clock begins to run soon after it was unpacked. The guest is asked how long it is up, and that is
  subtracted from the host's clock; of several answers the one that came back fastest counts. Unpacking it is the
  loader's share.
- *User space*: systemd says when it began, by the same clock.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.guests import Guest

LOOK_S = 0.002
HANDS_OVER = b"Booting from"
ASKED = 7


def debug_port(path: Path) -> list[str]:
    """QEMU's arguments for a debug port of the firmware that is a file."""
    return ["-chardev", f"file,id=firmware,path={path}", "-device", "isa-debugcon,iobase=0x402,chardev=firmware"]


class Firmware:
    """Waits until a file has the firmware's word that it hands over.

    `host_us` is when it was seen; none if it was not.
    """

    def __init__(self, path: Path) -> None:
        self.host_us: int | None = None
        self._path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            try:
                said = self._path.read_bytes()
            except FileNotFoundError:
                continue
            if HANDS_OVER in said:
                self.host_us = time.time_ns() // 1000
                return

    def __enter__(self) -> "Firmware":
        """Begin; what an earlier QEMU has left there is removed."""
        self._path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Clock:
    """When a guest's kernel began, by the host's clock, and how far that is from certain."""

    host_us: int
    within_us: int


def kernel_began(guest: Guest) -> Clock:
    """Ask a guest."""
    found = []
    for _ in range(ASKED):
        before = time.time_ns() // 1000
        seconds = float(guest.command("uptime").split()[1])
        after = time.time_ns() // 1000
        found.append(Clock((before + after) // 2 - round(seconds * 1e6), (after - before) // 2))
    return min(found, key=lambda clock: clock.within_us)


def user_space_after_us(said: str) -> int:
    """How long after its kernel systemd began, of what `systemctl show -p UserspaceTimestampMonotonic` says."""
    name, separator, value = said.strip().partition("=")
    if name != "UserspaceTimestampMonotonic" or not separator:
        raise ValueError(f"systemctl says no UserspaceTimestampMonotonic: {said[:200]!r}")
    return int(value)
