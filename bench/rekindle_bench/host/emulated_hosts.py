"""Emulated hosts of the host-reboot benchmark, and guests that run on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_bench.environment import Environment, workspace
from rekindle_bench.rows import RowFile
from rekindle_lab.rekindle import Rekindle

from .plan import Plan

Done = dict[tuple[str, str, int, int, str], int]
"""Number of reboots that have rows already: by case, way, number of guests, their MiB, and `Row.where`."""


@dataclass
class HostEnvironment(Environment):
    """The environment of the host-reboot benchmark: emulated hosts, reboots that are done, and records of reboots."""

    plan: Plan
    done: Done
    hosts: int = 0
    """Number of emulated hosts so far; names the folder of the next one."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Reboots with the client's throughput, for figure 8."""

    def breakdown_of(self, vms: int) -> tuple[str, ...]:
        """Returns the ways for which throughput over time is recorded: only with the largest number of guests."""
        if vms != max(self.plan.counts):
            return ()
        have = {record["how"] for record in self.records}
        return tuple(how for how in ("warm", "saved", "cold") if how not in have)


@contextmanager
def environment(
    root: Path, binary: Path, qemu: str, rows: RowFile, disk: Path, plan: Plan, done: Done
) -> Iterator[HostEnvironment]:
    """Sets up the environment. `disk`: a folder on a real disk, for the disks of emulated hosts."""
    with workspace(binary, disk) as space:
        yield HostEnvironment(root, Rekindle(binary, space.work / "run"), qemu, rows, space, plan, done)
