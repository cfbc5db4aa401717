"""Raw rows of the host-reboot benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from rekindle_bench.rows import read_rows

HOWS = ("warm", "saved", "cold")
"""The ways to reboot a host.

- `warm`: by kexec; guests' RAM stays in place.
- `saved`: guests' RAM is written to disk and read again.
- `cold`: guests are shut down, and boot again.
"""
Outcome = Literal["kept", "booted", "gone"]
"""`kept`: the guest continues with its memory; `booted`: it has booted; `gone`: neither within the deadline."""


@dataclass(kw_only=True)
class Row:
    """The outcome of one reboot of the host for one guest.

    Names end in the unit. `*_host_us` is when an event happened, in microseconds since 1970 by this machine's clock,
    also for events in the emulated host. The durations of the stages, from `suspend_us` to `userspace_us`, are the same
    in all rows of one reboot.
    """

    case: str
    """`sizes`, `counts`, `losses` (of connections), `faults`; see `cases`."""
    how: str
    """A member of `HOWS`."""
    vms: int
    """Number of guests on the host."""
    memory_mib: int
    """RAM of the guest, in MiB."""
    round: int
    """Number of the repetition, from 0. Rows of guests that were rebooted together have the same number."""
    vm: str
    """Name of the guest."""
    where: str = "emulated"
    """`emulated`: guests of an emulated host. `direct`: guests of this machine, whose kernel stays."""
    gap_us: int | None = None
    """The client's longest time without a connection, in microseconds. The client connects anew for each request."""
    gap_start_host_us: int | None = None
    """When this time began: the last answer before it."""
    gap_end_host_us: int | None = None
    """When this time ended: the first answer after it."""
    outcome: str = ""
    """The actual outcome: a value of `Outcome`."""
    wanted: str = "kept"
    """The outcome that `how` should have: a value of `Outcome`."""
    sessions: int | None = None
    """Number of TCP connections to the guest that were open before the reboot."""
    sessions_lost: int | None = None
    """Number of these connections that were lost."""
    fault: str = ""
    """The fault point and the kind of fault; empty without a fault."""
    seed: int | None = None
    """Not used; empty in all rows."""
    suspend_us: int | None = None
    """From the first guest's stop until the record of all guests is valid, in microseconds."""
    resume_us: int | None = None
    """From when the new kernel provides what guests need until the last guest runs, in microseconds."""
    ahead_us: int | None = None
    """Preparation while the guests still ran, in microseconds."""
    services_us: int | None = None
    """From the command to the first guest's silence, in microseconds: the host's services stop."""
    down_us: int | None = None
    """From the valid record until the machine is reset, or the next kernel begins, in microseconds."""
    firmware_us: int | None = None
    """From the reset until the kernel begins, in microseconds; `None` if kexec enters the kernel."""
    kernel_us: int | None = None
    """From the start of the kernel to that of user space, in microseconds."""
    userspace_us: int | None = None
    """From the start of user space until guests' RAM, KVM and bridges are available, in microseconds."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps of the suspend and of the resume, as in the VM's timeline."""
    note: str = ""
    """Why a reboot with a fault has another outcome, or that the fault did not happen."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "host")
