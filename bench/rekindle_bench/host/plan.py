"""The full and the quick plan: number of host reboots, and the guests with their sizes."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer
from rekindle_lab.guests import size

SMALL_MIB = 128
"""MiB of each guest in the cases with several guests."""


@dataclass(frozen=True)
class Plan:
    """Number of reboots of the host, by guests and way."""

    ways_by_mib: dict[int, dict[str, int]]
    """Reboots of each way with one filled guest, by MiB of RAM."""
    ways_by_vms: dict[int, dict[str, int]]
    """Reboots of each way with small guests, by their number."""
    rounds_in_a_row: int
    """Warm reboots in a row, with connections open during all of them."""
    emulated_faults: int
    """Warm reboots of an emulated host with a fault."""
    direct_faults: int
    """Suspends and resumes with a fault, of guests on this machine: their QEMUs are ended, the kernel stays."""
    budget_s: float | None = None
    """No reboot begins later than this many seconds after the start."""


FULL = Plan(
    ways_by_mib={
        128: {"warm": 5, "saved": 2, "cold": 2},
        512: {"warm": 3, "saved": 1, "cold": 1},
        1024: {"warm": 5, "saved": 2, "cold": 1},
    },
    ways_by_vms={
        1: {"warm": 3, "saved": 1, "cold": 2},
        2: {"warm": 3, "saved": 1, "cold": 2},
        4: {"warm": 5, "saved": 2, "cold": 5},
    },
    rounds_in_a_row=10,
    emulated_faults=10,
    direct_faults=40,
)

QUICK = Plan(
    ways_by_mib={128: {"warm": 1, "saved": 0, "cold": 0}},
    ways_by_vms={4: {"warm": 1, "saved": 0, "cold": 1}},
    rounds_in_a_row=0,
    emulated_faults=0,
    direct_faults=6,
    budget_s=330.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the reboots that `plan` omits from the full plan."""
    lines: list[str] = []
    for mib, full in FULL.ways_by_mib.items():
        lines += _fewer_reboots(f"1 guest with {size(mib)}", plan.ways_by_mib.get(mib, {}), full)
    for count, full in FULL.ways_by_vms.items():
        lines += _fewer_reboots(f"guests: {count}", plan.ways_by_vms.get(count, {}), full)
    return [
        *lines,
        *fewer("warm reboots in a row with connections open", plan.rounds_in_a_row, FULL.rounds_in_a_row),
        *fewer("reboots of the emulated host with a fault", plan.emulated_faults, FULL.emulated_faults),
        *fewer("suspends and resumes on this machine with a fault", plan.direct_faults, FULL.direct_faults),
    ]


def _fewer_reboots(guests: str, own: dict[str, int], full: dict[str, int]) -> list[str]:
    """Returns a line with the reboots of each way, if they differ from the full plan."""
    counts = [f"{how} {own.get(how, 0)} of {count}" for how, count in full.items()]
    return [] if own == full else [f"{guests}: {', '.join(counts)}"]
