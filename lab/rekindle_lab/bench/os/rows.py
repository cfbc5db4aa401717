"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_lab.bench.rows import read_rows

FROZEN = "-frozen"
"""Ends the name of a way in which the former guest's file systems are frozen by its agent, and it is powered off."""
WAYS = ("cold", "warm-cache", "kexec", "phase-kernel", "phase-services", "phase-services-frozen")
"""How Rekindle reboots a guest; a phase with the candidate that is asked for."""
PEERS = ("qboot", "microvm", "incoming", "loadvm")
"""The kernel started by a firmware for that; by the machine `microvm`; a full save, an internal snapshot, loaded."""


@dataclass
class Row:
    """One reboot, or one guest brought back by a peer.

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
    """The longest silence of the client around it."""
    first_us: int | None = None
    """How long the first request after it took, from connecting to the last byte."""
    silent_host_us: int | None = None
    """The last answer before it."""
    ended_host_us: int | None = None
    """The former guest's QEMU had ended; none by kexec. Of a peer: its new QEMU was started."""
    running_host_us: int | None = None
    """The new QEMU runs the guest: its first instruction, or the one after the candidate; none by kexec."""
    loader_host_us: int | None = None
    """The firmware hands over to what loads the kernel."""
    kernel_host_us: int | None = None
    """The kernel's clock begins."""
    user_host_us: int | None = None
    """The first program of the root file system begins; none where that cannot be seen."""
    served_host_us: int | None = None
    """The first answer after it."""
    load_us: int | None = None
    """By phase: from the command to the guest's running, without the end of the former one, beside which most of it is
    done. Of a peer that loads: from its QEMU's start."""
    command_us: int | None = None
    candidate: str = ""
    """The phase that it went on from."""
    ended: str = ""
    """How the former guest came to its end."""
    leaked_bytes: int | None = None
    """What the injector's pieces take."""
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
    """The rows of a file. Numbers that are not there are NaN; `steps` stays JSON text."""
    frame = read_rows(path, Row, "os")
    return frame.fillna({"candidate": "", "ended": ""})
