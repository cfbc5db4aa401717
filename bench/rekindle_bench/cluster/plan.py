"""The full and the quick plan: numbers of kills and random faults, and repetitions for the cost of output commit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Repetitions of each case."""

    failovers: int
    """Number of nodes that are killed, one after the other."""
    faults: int
    """Random kills, stops, partitions and outages of the store."""
    held: int
    """Faults with output commit."""
    held_off: int
    """Kills without output commit at the interval of `held`: the check must detect lost ticks."""
    output_rounds: int
    """Turns of each way in `output`, the measurement of output commit's cost."""
    output_every_s: tuple[float, ...]
    """Checkpoint intervals of `output`."""
    budget_s: float | None = None
    """No case or fault begins later than this many seconds after the start."""
    trips_s: float = 6.0
    """Duration of a window of round trips, in s."""
    many_s: float = 4.0
    """Duration of a window of answers per second, in s."""


FULL = Plan(failovers=20, faults=100, held=20, held_off=5, output_rounds=6, output_every_s=(0.05, 0.2, 1.0))
QUICK = Plan(failovers=2, faults=2, held=1, held_off=1, output_rounds=2, output_every_s=(0.2,), budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    pairs = (
        ("fail-overs", "failovers"),
        ("faults at random", "faults"),
        ("faults with output commit", "held"),
        ("fail-overs at that interval without output commit", "held_off"),
        ("turns of what output commit costs", "output_rounds"),
    )
    lines = [
        f"{what}: {getattr(plan, name)} of {getattr(FULL, name)}"
        for what, name in pairs
        if getattr(plan, name) < getattr(FULL, name)
    ]
    omitted = [f"{every_s:g} s" for every_s in FULL.output_every_s if every_s not in plan.output_every_s]
    return lines + ([f"what output commit costs with a checkpoint every {', '.join(omitted)}"] if omitted else [])
