"""Leaks of kernel memory in a guest, made by the kernel module `tests/images/leak`, and the guest's memory figures.

An experiment leaks memory (`Leaky.leak`), reboots, and compares the figures (`Leaky.memory`) to see what was recovered.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rekindle_lab import guests
from rekindle_lab.os_guest import OsGuest
from rekindle_lab.rekindle import RekindleError

LEAK_PORT = 7003
"""Port at which a micro guest accepts commands for the module: `get`, and `set PARAMETER VALUE`."""
PARAMETERS = "/sys/module/rekindle_leak/parameters"


def leak_image(root: Path) -> Path:
    """Returns the folder with the image `micro-leak` and the module, built if necessary."""
    return guests.run_build(root / "tests/images/leak/build")


@dataclass(frozen=True)
class Memory:
    """Memory figures of a guest's kernel, in KiB."""

    slab_kib: int
    """`SUnreclaim`: memory that the kernel has allocated and does not release by itself."""
    available_kib: int
    """`MemAvailable`."""


class Leaky(Protocol):
    """A guest with the leak module."""

    guest: OsGuest

    def memory(self) -> Memory:
        """Returns the guest's present memory figures."""

    def leak(self, mib: int) -> int:
        """Leaks `mib` MiB immediately; returns the bytes that the leak has allocated."""


def leaky(guest: OsGuest, built: Path) -> Leaky:
    """Returns access to the module in a guest. `built`: the result of `leak_image`."""
    return _Micro(guest) if guest.kind == "micro" else _Debian(guest, built / "rekindle_leak.ko")


@dataclass(frozen=True)
class _Micro:
    """A micro guest, whose image has the module and a command port for it."""

    guest: OsGuest

    def _get(self) -> dict[str, int]:
        reply = self.guest.command("get", port=LEAK_PORT)
        if not reply.startswith("ok "):
            raise RekindleError(f"{self.guest.name}: get: {reply}")
        return {name: int(value) for name, value in (word.split("=") for word in reply.split()[1:])}

    def memory(self) -> Memory:
        known = self._get()
        return Memory(known["SUnreclaim"], known["MemAvailable"])

    def leak(self, mib: int) -> int:
        before = self._get()["leaked_bytes"]
        reply = self.guest.command(f"set leak_now {mib}", port=LEAK_PORT)
        if reply != "ok":
            raise RekindleError(f"{self.guest.name}: leak_now {mib}: {reply}")
        return self._get()["leaked_bytes"] - before


@dataclass(frozen=True)
class _Debian:
    """A Debian guest. The module is copied to the guest over ssh after each boot, since a reboot removes it."""

    guest: OsGuest
    module: Path

    def memory(self) -> Memory:
        meminfo = self.guest.ssh("cat /proc/meminfo")
        known = {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", meminfo, re.MULTILINE)}
        return Memory(known["SUnreclaim"], known["MemAvailable"])

    def leak(self, mib: int) -> int:
        self.guest.ssh(
            "test -d /sys/module/rekindle_leak || { cat >/run/rekindle_leak.ko && insmod /run/rekindle_leak.ko; }",
            self.module.read_bytes(),
        )
        read = f"cat {PARAMETERS}/leaked_bytes"
        return int(self.guest.ssh(f"a=$({read}) && echo {mib} >{PARAMETERS}/leak_now && echo $(($({read}) - a))"))
