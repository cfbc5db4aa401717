"""Raw rows of the VMM-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("warm", "cpr-transfer", "saved", "cold")
"""The ways to replace a guest's QEMU.

- `warm`: by Rekindle; RAM stays in place.
- `cpr-transfer`: the peer, by which QEMU replaces itself; RAM stays in place.
- `saved`: by Rekindle; RAM is written to disk and read again.
- `cold`: the guest is shut down, and boots in the new QEMU.
"""


@dataclass(kw_only=True)
class Row:
    """The outcome of one reboot for one VM.

    Names end in the unit. `*_host_us` is when an event happened, in microseconds since 1970.
    """

    case: str
    """`ram`, `sizes`, `count`, `solo`, `debian`, `losses`, `load`, `memory`, `breakdown`; see `cases`."""
    guest: str
    """Kind of the guest: `micro`, `debian`."""
    memory_mib: int
    """RAM of the guest, in MiB."""
    vms: int
    """Number of VMs that are rebooted together."""
    how: str
    """A member of `HOWS`."""
    round: int
    """Number of the repetition, from 0. Rows of VMs that were rebooted together have the same number."""
    vm: str
    """Name of the VM."""
    stopped_us: int | None = None
    """Guest-stopped time: from the guest's stop to its resume, in microseconds."""
    stop_host_us: int | None = None
    """When the guest was stopped or, for `cold`, had shut down."""
    resume_host_us: int | None = None
    """When the guest was resumed or, for `cold`, began to boot."""
    total_us: int | None = None
    """From the first stop to the last resume of all VMs that were rebooted together, in microseconds."""
    command_us: int | None = None
    """Duration of the command as measured by its caller, in microseconds."""
    gap_us: int | None = None
    """The client's longest time without an answer around the reboot, in microseconds."""
    gap_start_host_us: int | None = None
    """When this time began: the last answer before it."""
    gap_end_host_us: int | None = None
    """When this time ended: the first answer after it."""
    answered: int | None = None
    """Number of the client's requests that were answered."""
    failed: int | None = None
    """Number of the client's requests that failed."""
    connections_lost: int | None = None
    """Number of the client's connections that were lost."""
    sessions: int | None = None
    """Number of TCP and ssh sessions that were open before the reboot, and tried after it."""
    sessions_lost: int | None = None
    """Number of these sessions that failed after the reboot."""
    memory_changed_bytes: int | None = None
    """With `--verify-memory`: bytes of RAM blocks that differ after the reboot."""
    from_version: str = ""
    """Version of the previous QEMU."""
    to_version: str = ""
    """Version of the new QEMU."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the reboot, each with `phase`, `step`, `start_host_us` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "vmm")
