"""The full and the quick plan: number of host reboots, and the guests with their sizes."""

from dataclasses import dataclass

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
    lines = []
    for what, full, own in (
        ("guest with", FULL.ways_by_mib, plan.ways_by_mib),
        ("guests:", FULL.ways_by_vms, plan.ways_by_vms),
    ):
        for key, ways in full.items():
            label = f"1 {what} {size(key)}" if full is FULL.ways_by_mib else f"{what} {key}"
            fewer = [f"{how} {own.get(key, {}).get(how, 0)} of {n}" for how, n in ways.items()]
            if own.get(key, {}) != ways:
                lines.append(f"{label}: {', '.join(fewer)}")
    for what, name in (
        ("warm reboots in a row with connections open", "rounds_in_a_row"),
        ("reboots of the emulated host with a fault", "emulated_faults"),
        ("suspends and resumes on this machine with a fault", "direct_faults"),
    ):
        if getattr(plan, name) < getattr(FULL, name):
            lines.append(f"{what}: {getattr(plan, name)} of {getattr(FULL, name)}")
    return lines
