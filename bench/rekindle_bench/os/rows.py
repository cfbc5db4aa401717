"""Raw rows of the OS-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

WAYS = ("cold", "warm-cache", "kexec", "phase-kernel", "phase-services", "phase-services-frozen")
"""The ways of Rekindle to reboot a guest.

- `cold`: shut down and boot.
- `warm-cache`: the same, but the disk server retains the guest's page cache.
- `kexec`: the guest's kernel starts the next one.
- `phase-kernel`: resume from the boot snapshot (*candidate*) that was saved when the kernel had started.
- `phase-services`: resume from the candidate that was saved when the services had started.
- `phase-services-frozen`: the same, but see `FROZEN`.
"""
FROZEN = "-frozen"
"""Suffix of a way that does not shut the previous guest down: its agent freezes the file systems, then it is powered
off."""
PEERS = ("qboot", "microvm", "incoming", "loadvm")
"""Other ways to start a guest soon, without Rekindle.

- `qboot`: boot with a minimal firmware.
- `microvm`: boot on QEMU's machine `microvm`.
- `incoming`: load a full save of the guest.
- `loadvm`: load a snapshot inside the disk image.
"""


@dataclass(kw_only=True)
class Row:
    """One reboot, or one restart by a peer.

    Names end in the unit. `*_host_us` is when an event happened, in microseconds since 1970 by the host's clock. Stages
    of the boot are between these events, from `silent_host_us` to `served_host_us`.
    """

    case: str
    """`reboot`, `leak` (a reboot after kernel memory was leaked), `peers`."""
    guest: str
    """`micro`, `debian`, `immutable`."""
    memory_mib: int
    """RAM of the guest, in MiB."""
    how: str
    """Way or peer: a member of `WAYS` or `PEERS`."""
    round: int
    """Number of the repetition of this case, guest and way; from 0."""
    gap_us: int | None = None
    """The client's longest time without an answer around the reboot, in microseconds."""
    first_us: int | None = None
    """Duration of the first request after the reboot, from connecting to the last byte, in microseconds."""
    silent_host_us: int | None = None
    """When the client got the last answer before the reboot."""
    ended_host_us: int | None = None
    """When the QEMU of the previous guest had ended; `None` for `kexec`. For a peer: when its new QEMU was started."""
    running_host_us: int | None = None
    """When the new QEMU began to run the guest, from its boot or from a candidate. `None` for `kexec`, and for
    a peer that boots."""
    loader_host_us: int | None = None
    """When the firmware started the kernel's loader; `None` where that was not observed."""
    kernel_host_us: int | None = None
    """When the clock of the new kernel started; `None` for a guest that resumes from a candidate, and for peers."""
    user_host_us: int | None = None
    """When the first program of the root file system started; `None` where that cannot be observed."""
    served_host_us: int | None = None
    """When the client got the first answer after the reboot."""
    load_us: int | None = None
    """How long a candidate or a save was loaded, in microseconds; `None` for a boot. For a phase from the command until
    the guest ran, without the end of the previous guest; for a peer from the start of its QEMU."""
    command_us: int | None = None
    """Duration of the command `rekindle reboot`, in microseconds; `None` for a peer."""
    candidate: str = ""
    """Candidate from which the guest resumed: `kernel` or `services`; empty for other ways."""
    ended: str = ""
    """How the previous guest ended, as the command reports it; empty for a peer."""
    leaked_bytes: int | None = None
    """For `leak`: kernel memory that was leaked, in bytes."""
    slab_before_kib: int | None = None
    """For `leak`: `SUnreclaim` of the guest's /proc/meminfo before the leak, in KiB."""
    slab_leaked_kib: int | None = None
    """For `leak`: `SUnreclaim` after the leak, before the reboot, in KiB."""
    slab_after_kib: int | None = None
    """For `leak`: `SUnreclaim` after the reboot, in KiB."""
    available_before_kib: int | None = None
    """For `leak`: `MemAvailable` of the guest's /proc/meminfo before the leak, in KiB."""
    available_leaked_kib: int | None = None
    """For `leak`: `MemAvailable` after the leak, before the reboot, in KiB."""
    available_after_kib: int | None = None
    """For `leak`: `MemAvailable` after the reboot, in KiB."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the command, each with `step`, `start_host_us` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    frame = read_rows(path, Row, "os")
    return frame.fillna({"candidate": "", "ended": ""})
