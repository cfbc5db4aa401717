"""Raw rows of the VMM-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("warm", "cpr-transfer", "saved", "cold")


@dataclass
class Row:
    """The outcome of one reboot for one VM. Names end in the unit; `*_host_us`: microseconds since 1970."""

    case: str
    """`ram`, `sizes`, `count`, `solo`, `debian`, `losses`, `load`, `memory`, `breakdown`."""
    guest: str
    memory_mib: int
    vms: int
    how: str
    round: int
    """Rows of one case, guest, size, number and way with the same round belong to one operation."""
    vm: str
    stopped_us: int | None = None
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
    failed: int | None = None
    connections_lost: int | None = None
    sessions: int | None = None
    """Number of open TCP and ssh sessions that were tried after the reboot; `sessions_lost` of them failed."""
    sessions_lost: int | None = None
    memory_changed_bytes: int | None = None
    from_version: str = ""
    to_version: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "vmm")
