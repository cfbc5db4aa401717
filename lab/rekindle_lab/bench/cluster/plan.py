"""How often a node is killed, and how many faults there are at random."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Repetitions."""

    failovers: int
    """Nodes killed, one after the other."""
    faults: int
    """Kills, stops, partitions and outages of the store at random."""
    held: int
    """The same with output commit."""
    budget_s: float | None = None
    """A case, or a fault, that would begin later than this is left out."""


FULL = Plan(failovers=20, faults=100, held=20)
QUICK = Plan(failovers=3, faults=3, held=2, budget_s=330.0)


def left_out(plan: Plan) -> list[str]:
    """What of the full plan this one does not do, in words."""
    pairs = (("fail-overs", "failovers"), ("faults at random", "faults"), ("faults with output commit", "held"))
    return [
        f"{what}: {getattr(plan, name)} of {getattr(FULL, name)}"
        for what, name in pairs
        if getattr(plan, name) < getattr(FULL, name)
    ]
