"""Emulated hosts of the host-reboot benchmark, and guests that run on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_bench.environment import Environment, Setup
from rekindle_bench.rows import read_sidecar, write_sidecar

from .plan import Plan
from .rows import HOWS, read

RECORDS = "host-breakdown.json"
"""File of the client's throughput during single reboots, for figure 8."""

FinishedRounds = dict[tuple[str, str, int, int, str], int]
"""Number of reboots that have rows already: by case, way, number of guests, their MiB, and `Row.where`."""


@dataclass
class HostEnvironment(Environment):
    """The environment of the host-reboot benchmark: emulated hosts, reboots that are done, and records of reboots."""

    plan: Plan
    finished: FinishedRounds
    hosts: int = 0
    """Number of emulated hosts so far; names the folder of the next one."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Reboots with the client's throughput, for figure 8."""

    def breakdown_of(self, vms: int) -> tuple[str, ...]:
        """Returns the ways for which throughput over time is recorded: only with the largest number of guests."""
        if vms != max(self.plan.ways_by_vms):
            return ()
        recorded = {record["how"] for record in self.records}
        return tuple(how for how in HOWS if how not in recorded)


@contextmanager
def environment(setup: Setup) -> Iterator[HostEnvironment]:
    """Sets up the environment. At the end it writes the records of the client's throughput next to the rows."""
    raw = setup.rows.path
    with setup.workspace() as space:
        env = setup.environment(HostEnvironment, space, plan=setup.plan, finished=finished_rounds(raw))
        if setup.rows.is_continued:
            env.records = read_sidecar(raw, RECORDS, [])
        try:
            yield env
        finally:
            write_sidecar(raw, RECORDS, env.records)


def finished_rounds(raw: Path) -> FinishedRounds:
    """Counts, for each kind of reboot, the reboots that have all their rows in a file."""
    frame = read(raw)
    keys = ["case", "how", "vms", "memory_mib", "where"]
    complete = frame.groupby([*keys, "round"]).size().reset_index(name="rows")
    complete = complete[complete["rows"] >= complete["vms"]]
    return {
        (str(case), str(how), int(vms), int(mib), str(where)): int(group["round"].max()) + 1
        for (case, how, vms, mib, where), group in complete.groupby(keys)
    }
