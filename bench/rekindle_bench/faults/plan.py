"""Number of runs, and the guest."""

from dataclasses import dataclass

from .kinds import KINDS

MEMORY_MIB = 128
BLOCKS = 8192
"""Blocks of the guest's disk, 4096 bytes each: as many as fit into its memory."""


@dataclass(frozen=True)
class Plan:
    """Numbers of runs."""

    runs: int
    """Of each type of faults."""
    unchecked: int
    """Of each type, without the check of digests."""
    lanes: int = 2
    """Concurrent guests: a run waits more than it computes."""
    wait_s: float = 3.0
    """Delay from the last fault until the guest is checked; 60 s in the paper."""
    budget_s: float | None = None
    """A run that would begin later than this is left out."""
    kinds: tuple[str, ...] = tuple(kind.name for kind in KINDS)
    """The types of faults."""


FULL = Plan(runs=50, unchecked=10)
QUICK = Plan(runs=2, unchecked=1, budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """Lists what this plan omits from the full one."""
    if plan == FULL:
        return []
    return [f"runs of each type: {plan.runs} of {FULL.runs} checked, {plan.unchecked} of {FULL.unchecked} unchecked"]
