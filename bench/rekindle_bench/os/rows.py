"""Raw rows of the OS-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

FROZEN = "-frozen"
"""Suffix of a way in which the agent freezes the previous guest's file systems, and the guest is powered off."""
WAYS = ("cold", "warm-cache", "kexec", "phase-kernel", "phase-services", "phase-services-frozen")
"""The ways of Rekindle to reboot a guest.

`cold`: shut down and boot. `warm-cache`: the same, but the disk server retains the guest's page cache. `kexec`: the
guest's kernel starts the next one. `phase-kernel`, `phase-services`: from the boot snapshot (*candidate*) of that name.
"""
PEERS = ("qboot", "microvm", "incoming", "loadvm")
"""Start by a minimal firmware; start on the machine `microvm`; load of a full save; load of an internal snapshot."""


@dataclass(kw_only=True)
class Row:
    """One reboot, or one restart by a peer.

    Names end in the unit. `*_host_us` is when an event happened: microseconds since 1970 by the host's clock.
    """

    case: str
    """`reboot`, `leak`, `peers`."""
    guest: str
    """`micro`, `debian`, `immutable`."""
    memory_mib: int
    how: str
    """Way or peer: a member of `WAYS` or `PEERS`."""
    round: int
    gap_us: int | None = None
    """The client's longest time without an answer around the reboot."""
    first_us: int | None = None
    """Duration of the first request after the reboot, from connecting to the last byte."""
    silent_host_us: int | None = None
    """The last answer before the reboot."""
    ended_host_us: int | None = None
    """The previous guest's QEMU had ended; `None` with kexec. For a peer: the new QEMU was started."""
    running_host_us: int | None = None
    """The new QEMU ran the guest: its first instruction, or the one after the candidate; `None` with kexec."""
    loader_host_us: int | None = None
    """The firmware started the kernel's loader."""
    kernel_host_us: int | None = None
    """The kernel's clock started."""
    user_host_us: int | None = None
    """The first program of the root file system started; `None` where that cannot be observed."""
    served_host_us: int | None = None
    """The first answer after the reboot."""
    load_us: int | None = None
    """With a phase: from the command until the guest runs, without the end of the previous guest. Most of the load is
    done before that end. For a peer that loads: from the start of its QEMU."""
    command_us: int | None = None
    candidate: str = ""
    """The candidate from which the guest resumed."""
    ended: str = ""
    """Way in which the previous guest ended."""
    leaked_bytes: int | None = None
    """Memory that the leak module has allocated."""
    slab_before_kib: int | None = None
    """`SUnreclaim` of /proc/meminfo before the leak, after a reboot in the same way. Next field: after the leak."""
    slab_leaked_kib: int | None = None
    slab_after_kib: int | None = None
    """`SUnreclaim` after the reboot that follows the leak."""
    available_before_kib: int | None = None
    """`MemAvailable`, at the same three times as `SUnreclaim`."""
    available_leaked_kib: int | None = None
    available_after_kib: int | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    frame = read_rows(path, Row, "os")
    return frame.fillna({"candidate": "", "ended": ""})
