"""The faults of a host's reboot: what `REKINDLE_FAULT` (crates/vm/src/fault.rs) does at which point of a command."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Fault:
    """Kills a process when `rekindle host suspend` or `rekindle host resume` reaches a point."""

    command: Literal["suspend", "resume"]
    point: str
    victim: Literal["kill", "kill-new"] = "kill"
    """`kill`: Rekindle; `kill-new`: the QEMU that it has started for a guest."""

    def __str__(self) -> str:
        """Returns the value of `REKINDLE_FAULT`."""
        return f"host.{self.command}.{self.point}:{self.victim}"


FAULTS = (
    Fault("suspend", "journalled"),
    Fault("suspend", "stopped"),
    Fault("suspend", "saved"),
    Fault("suspend", "listed"),
    Fault("suspend", "committed"),
    Fault("suspend", "ended"),
    Fault("resume", "placed"),
    Fault("resume", "loaded"),
    Fault("resume", "loaded", "kill-new"),
    Fault("resume", "struck"),
    Fault("resume", "resumed"),
    Fault("resume", "recorded"),
)
"""Every point of both commands, except those at which a killed Rekindle would take a running QEMU along: the death of a
running QEMU would not be a fault of a reboot. The order is fixed, since random draws index it."""
