"""The full and the quick plan of the fault experiment, and the size of the guest's disk."""

from dataclasses import dataclass

from .kinds import KINDS

MEMORY_MIB = 128
BLOCKS = 8192
"""Blocks of the guest's disk, 4096 bytes each. All of them fit into the guest's memory."""


@dataclass(frozen=True)
class Plan:
    """Numbers of runs."""

    runs: int
    """Runs of each type of faults."""
    unchecked: int
    """Runs of each type without the check of digests."""
    lanes: int = 2
    """Number of guests that run concurrently. A run mostly waits, so more guests than processors are possible."""
    wait_s: float = 3.0
    """Seconds from the last fault until the guest is checked; 60 s in the paper."""
    budget_s: float | None = None
    """No run begins later than this many seconds after the start."""
    kinds: tuple[str, ...] = tuple(kind.name for kind in KINDS)
    """The types of faults."""


FULL = Plan(runs=50, unchecked=10)
QUICK = Plan(runs=2, unchecked=1, budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """Lists the runs that `plan` omits from the full plan."""
    if plan == FULL:
        return []
    return [f"runs of each type: {plan.runs} of {FULL.runs} checked, {plan.unchecked} of {FULL.unchecked} unchecked"]
