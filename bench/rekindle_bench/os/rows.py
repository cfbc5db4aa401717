"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

FROZEN = "-frozen"
"""Suffix of a way in which the agent freezes the previous guest's file systems, and the guest is powered off."""
WAYS = ("cold", "warm-cache", "kexec", "phase-kernel", "phase-services", "phase-services-frozen")
"""How Rekindle reboots a guest; a phase is named with its candidate."""
PEERS = ("qboot", "microvm", "incoming", "loadvm")
"""Start by a minimal firmware; by the machine `microvm`; load of a full save; load of an internal snapshot."""


@dataclass
class Row:
    """One reboot, or one restart by a peer.

    Names end in the unit; times of the host's clock are since 1970.
    """

    case: str
    """`reboot`, `leak`, `peers`."""
    guest: str
    """`micro`, `debian`, `immutable`."""
    memory_mib: int
    how: str
    """One of the `WAYS` or of the `PEERS`."""
    round: int
    gap_us: int | None = None
    """The client's longest time without an answer around it."""
    first_us: int | None = None
    """Duration of the first request after it, from connecting to the last byte."""
    silent_host_us: int | None = None
    """The last answer before it."""
    ended_host_us: int | None = None
    """The previous guest's QEMU had ended; none by kexec. Of a peer: its new QEMU was started."""
    running_host_us: int | None = None
    """The new QEMU runs the guest: its first instruction, or the one after the candidate; none by kexec."""
    loader_host_us: int | None = None
    """The firmware starts the kernel's loader."""
    kernel_host_us: int | None = None
    """The kernel's clock starts."""
    user_host_us: int | None = None
    """The first program of the root file system starts; none where that cannot be observed."""
    served_host_us: int | None = None
    """The first answer after it."""
    load_us: int | None = None
    """By phase: from the command until the guest runs, without the end of the previous one, during which most of it
    is done. Of a peer that loads: from its QEMU's start."""
    command_us: int | None = None
    candidate: str = ""
    """The candidate from which it resumed."""
    ended: str = ""
    """How the previous guest ended."""
    leaked_bytes: int | None = None
    """Memory that the leak module has allocated."""
    slab_before_kib: int | None = None
    """`SUnreclaim` of /proc/meminfo before the leak, after a reboot of the same way."""
    slab_leaked_kib: int | None = None
    slab_after_kib: int | None = None
    """After the reboot."""
    available_before_kib: int | None = None
    """`MemAvailable`, at the same times."""
    available_leaked_kib: int | None = None
    available_after_kib: int | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    frame = read_rows(path, Row, "os")
    return frame.fillna({"candidate": "", "ended": ""})
