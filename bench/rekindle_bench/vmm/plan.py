"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of VMM reboots."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer, fewer_of_ways, missing
from rekindle_lab.guests import size

SMALLEST_MIB, LARGEST_MIB = 512, 8192
"""RAM of the smallest and of the largest guest in the full plan."""


@dataclass(frozen=True)
class Plan:
    """Number of reboots in each case, by way to reboot where it has several.

    Ways: `warm` (RAM stays in place), `saved` (RAM to disk and back), `cold` (the guest is booted anew), and the peer
    `cpr-transfer` (QEMU's own replacement of itself).
    """

    ways_by_mib: dict[int, dict[str, int]]
    """Repetitions of each way by MiB of RAM, all of it touched."""
    size_rounds: int
    """Warm reboots of the smallest and of the largest guest, in turn, to isolate the effect of size."""
    ways_by_vms: dict[int, dict[str, int]]
    """Repetitions of each way by number of small VMs, rebooted in parallel."""
    debian_ways: dict[str, int]
    """Repetitions of each way with one VM that has systemd, nginx and PostgreSQL."""
    rounds_under_load: int
    """Warm reboots in a row, under load."""
    compared_rounds: int
    """Warm reboots in which all RAM blocks are compared."""
    ways_over_time: tuple[str, ...]
    """Ways for which throughput over time is recorded, once each."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""
    smallest_largest_mib: tuple[int, int] = (SMALLEST_MIB, LARGEST_MIB)
    """MiB of RAM of the two guests of `size_rounds`."""


FULL = Plan(
    ways_by_mib={
        512: {"warm": 20, "cpr-transfer": 20, "saved": 5, "cold": 3},
        2048: {"warm": 12, "cpr-transfer": 12, "saved": 5, "cold": 2},
        8192: {"warm": 12, "cpr-transfer": 12, "saved": 2, "cold": 1},
    },
    size_rounds=15,
    ways_by_vms={n: {"warm": 10, "cpr-transfer": 10, "saved": 2, "cold": 1} for n in (1, 2, 4, 8, 11)},
    debian_ways={"warm": 10, "cpr-transfer": 10, "saved": 3, "cold": 3},
    rounds_under_load=50,
    compared_rounds=5,
    ways_over_time=("warm", "cpr-transfer", "saved", "cold"),
)

QUICK = Plan(
    ways_by_mib={
        512: {"warm": 12, "cpr-transfer": 12, "saved": 1, "cold": 1},
        2048: {"warm": 5, "cpr-transfer": 0, "saved": 2, "cold": 0},
    },
    size_rounds=8,
    ways_by_vms={
        1: {"warm": 5, "cpr-transfer": 5, "saved": 1, "cold": 0},
        11: {"warm": 5, "cpr-transfer": 0, "saved": 1, "cold": 0},
    },
    debian_ways={"warm": 0, "cpr-transfer": 0, "saved": 0, "cold": 0},
    rounds_under_load=10,
    compared_rounds=2,
    ways_over_time=("warm", "saved", "cold"),
    budget_s=390.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    lines: list[str] = []
    for mib, full in FULL.ways_by_mib.items():
        lines += fewer_of_ways(f"micro with {size(mib)}", plan.ways_by_mib.get(mib, {}), full, "all of it")
    for count, full in FULL.ways_by_vms.items():
        guests = f"{count} small VM{'s' if count > 1 else ''}"
        lines += fewer_of_ways(guests, plan.ways_by_vms.get(count, {}), full, "all of it")
    return [
        *lines,
        *fewer_of_ways("debian", plan.debian_ways, FULL.debian_ways, "all of it"),
        *fewer("smallest against largest guest", plan.size_rounds, FULL.size_rounds, unit=" reboots"),
        *fewer("reboots in a row under load", plan.rounds_under_load, FULL.rounds_under_load),
        *fewer("reboots with memory compared", plan.compared_rounds, FULL.compared_rounds),
        *missing("throughput over time", plan.ways_over_time, FULL.ways_over_time),
    ]
