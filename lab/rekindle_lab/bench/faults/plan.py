"""How often, and with what guest."""

from dataclasses import dataclass

from .kinds import KINDS

MEMORY_MIB = 128
BLOCKS = 8192
"""Of the guest's disk, 4096 bytes each: as much of it as fits into its memory."""


@dataclass(frozen=True)
class Plan:
    """How many runs."""

    runs: int
    """Of each type of faults."""
    unchecked: int
    """Of each type, without the check of digests."""
    lanes: int = 2
    """Guests at a time: a run waits more than it computes."""
    wait_s: float = 3.0
    """From the last fault until the guest is looked at; the paper's 60 s."""
    budget_s: float | None = None
    """A run that would begin later than this is left out."""
    kinds: tuple[str, ...] = tuple(kind.name for kind in KINDS)
    """The types of faults."""


FULL = Plan(runs=50, unchecked=10)
QUICK = Plan(runs=2, unchecked=1, budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """What of the full plan this one does not do, in words."""
    if plan == FULL:
        return []
    return [f"runs of each type: {plan.runs} of {FULL.runs} checked, {plan.unchecked} of {FULL.unchecked} unchecked"]
