"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("warm", "saved", "cold")
Outcome = Literal["kept", "booted", "gone"]


@dataclass
class Row:
    """The outcome of one reboot of the host for one guest.

    Names end in the unit. `*_host_us`: microseconds since 1970 by this machine's clock, also for what the emulated host
    did. `suspend_us`, `resume_us` and the stages are the same in all rows of one reboot.
    """

    case: str
    """`sizes`, `counts`, `losses`, `faults`."""
    how: str
    vms: int
    memory_mib: int
    round: int
    """Rows of one case, way, number and size with the same round belong to one reboot."""
    vm: str
    where: str = "emulated"
    """`direct`: guests of this machine, whose kernel stays."""
    gap_us: int | None = None
    """The longest time in which a client that connects anew each time got no connection, and its bounds."""
    gap_start_host_us: int | None = None
    gap_end_host_us: int | None = None
    outcome: str = ""
    """`kept`: it continues with its memory; `booted`: it has booted; `gone`: neither within the deadline."""
    wanted: str = "kept"
    sessions: int | None = None
    """TCP connections that were open before, and those of them that were lost."""
    sessions_lost: int | None = None
    fault: str = ""
    """The fault point and the kind of fault."""
    seed: int | None = None
    suspend_us: int | None = None
    """From the first guest's stop until the record of all is valid."""
    resume_us: int | None = None
    """From when the new kernel provides what guests need until the last of them runs."""
    ahead_us: int | None = None
    """Preparation while guests still ran."""
    services_us: int | None = None
    """From the command to the first guest's silence: the host's services stop."""
    down_us: int | None = None
    """From the record until the machine is reset, or the next kernel begins."""
    firmware_us: int | None = None
    """From the reset until the kernel begins; none if kexec enters it."""
    kernel_us: int | None = None
    userspace_us: int | None = None
    """Until guests' RAM, KVM and bridges are available."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "host")
