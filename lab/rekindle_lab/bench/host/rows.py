"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rekindle_lab.bench.rows import read_rows

HOWS = ("warm", "saved", "cold")
Outcome = Literal["kept", "booted", "gone"]


@dataclass
class Row:
    """What one reboot of the host did to one guest.

    Names end in the unit. `*_host_us`: microseconds since 1970 by this machine's clock, also for what the emulated host
    did. `suspend_us`, `resume_us` and the stages are the same in all rows of one reboot.
    """

    case: str
    """`sizes`, `counts`, `losses`, `faults`."""
    how: str
    vms: int
    memory_mib: int
    round: int
    """Rows of one case, way, number and size with the same round are one reboot."""
    vm: str
    where: str = "emulated"
    """`direct`: guests of this machine, whose kernel stays."""
    gap_us: int | None = None
    """How long a client that connects anew each time got no connection, and from when to when."""
    gap_start_host_us: int | None = None
    gap_end_host_us: int | None = None
    outcome: str = ""
    """`kept`: it goes on with its memory; `booted`: it has booted; `gone`: neither within the deadline."""
    wanted: str = "kept"
    sessions: int | None = None
    """TCP connections that were open before, and those that did not live on."""
    sessions_lost: int | None = None
    fault: str = ""
    """The point and what was done there."""
    seed: int | None = None
    suspend_us: int | None = None
    """From the first guest's stop until the record of all counts."""
    resume_us: int | None = None
    """From when the new kernel has what guests need until the last of them runs."""
    ahead_us: int | None = None
    """What was prepared while guests ran."""
    services_us: int | None = None
    """From the command to the first guest's silence: the host's services stop."""
    down_us: int | None = None
    """From the record until the machine is reset, or the next kernel begins."""
    firmware_us: int | None = None
    """From the reset until the kernel begins; none where kexec enters it."""
    kernel_us: int | None = None
    userspace_us: int | None = None
    """Until guests' RAM, KVM and bridges are there."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def read(path: Path) -> pd.DataFrame:
    """The rows of a file. Numbers that are not there are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "host")
