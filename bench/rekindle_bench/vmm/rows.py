"""Raw rows of the VMM-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("warm", "cpr-transfer", "saved", "cold")
"""The ways to replace a guest's QEMU. `warm`: Rekindle's, RAM stays in place. `cpr-transfer`: the peer, QEMU's own of
that kind. `saved`: RAM to disk and back. `cold`: shut down and boot."""


@dataclass(kw_only=True)
class Row:
    """The outcome of one reboot for one VM. Names end in the unit; `*_host_us`: microseconds since 1970."""

    case: str
    """`ram`, `sizes`, `count`, `solo`, `debian`, `losses`, `load`, `memory`, `breakdown`."""
    guest: str
    memory_mib: int
    vms: int
    """Number of VMs that are rebooted together."""
    how: str
    """A member of `HOWS`."""
    round: int
    """Rows of one case, guest, size, number and way with the same round belong to one operation."""
    vm: str
    """Name of the VM."""
    stopped_us: int | None = None
    """Guest-stopped time: between the next two."""
    stop_host_us: int | None = None
    resume_host_us: int | None = None
    total_us: int | None = None
    """From the first stop to the last resume of all VMs of the operation."""
    command_us: int | None = None
    """Duration of the command as measured by its caller."""
    gap_us: int | None = None
    """The client's longest time without an answer around the reboot; the next two fields are its bounds."""
    gap_start_host_us: int | None = None
    gap_end_host_us: int | None = None
    answered: int | None = None
    """Requests of the client that were answered; `failed` of the others were not."""
    failed: int | None = None
    connections_lost: int | None = None
    sessions: int | None = None
    """Number of open TCP and ssh sessions that were tried after the reboot; `sessions_lost` of them failed."""
    sessions_lost: int | None = None
    memory_changed_bytes: int | None = None
    """With `--verify-memory`: bytes of RAM blocks that differ after the reboot."""
    from_version: str = ""
    """Version of the previous QEMU; `to_version`: of the new one."""
    to_version: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the reboot, each with `phase`, `step`, `start_host_us` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "vmm")
