"""Raw rows of the host-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("warm", "saved", "cold")
"""The ways to reboot a host. `warm`: guests' RAM stays in place over kexec. `saved`: RAM to disk and back. `cold`:
guests are shut down and booted."""
Outcome = Literal["kept", "booted", "gone"]


@dataclass(kw_only=True)
class Row:
    """The outcome of one reboot of the host for one guest.

    Names end in the unit. `*_host_us`: microseconds since 1970 by this machine's clock, also for events in the emulated
    host. `suspend_us`, `resume_us` and the stages are the same in all rows of one reboot.
    """

    case: str
    """`sizes`, `counts`, `losses`, `faults`."""
    how: str
    """A member of `HOWS`."""
    vms: int
    """Number of guests on the host."""
    memory_mib: int
    round: int
    """Rows of one case, way, number and size with the same round belong to one reboot."""
    vm: str
    where: str = "emulated"
    """`emulated`: guests of an emulated host. `direct`: guests of this machine, whose kernel stays."""
    gap_us: int | None = None
    """The client's longest time without a connection, and its bounds. The client connects anew for each request."""
    gap_start_host_us: int | None = None
    gap_end_host_us: int | None = None
    outcome: str = ""
    """`kept`: the guest continues with its memory; `booted`: it has booted; `gone`: neither within the deadline."""
    wanted: str = "kept"
    """The outcome that `how` should have."""
    sessions: int | None = None
    """Number of TCP connections that were open before the reboot; `sessions_lost` of them were lost."""
    sessions_lost: int | None = None
    fault: str = ""
    """The fault point and the kind of fault."""
    seed: int | None = None
    suspend_us: int | None = None
    """From the first guest's stop until the record of all guests is valid."""
    resume_us: int | None = None
    """From when the new kernel provides what guests need until the last guest runs."""
    ahead_us: int | None = None
    """Preparation while the guests still ran."""
    services_us: int | None = None
    """From the command to the first guest's silence: the host's services stop."""
    down_us: int | None = None
    """From the valid record until the machine is reset, or the next kernel begins."""
    firmware_us: int | None = None
    """From the reset until the kernel begins; `None` if kexec enters the kernel."""
    kernel_us: int | None = None
    """From the start of the kernel to that of user space."""
    userspace_us: int | None = None
    """From the start of user space until guests' RAM, KVM and bridges are available."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "host")
