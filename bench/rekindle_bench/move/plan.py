"""The full plan, and the quick plan of 8 minutes: repetitions, sizes and loads of moves."""

from dataclasses import dataclass

from rekindle_lab.guests import size


@dataclass(frozen=True)
class Plan:
    """Sizes and loads of the guests, and repetitions of each move."""

    sizes: dict[int, str]
    """Sizes of the guest: MiB of RAM, and how much of it the guest has filled."""
    loads: tuple[int, ...]
    """Loads: MB of its memory that the guest writes each second."""
    rounds: int
    """Moves in each way, by size and load."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(sizes={512: "384M", 2048: "1536M"}, loads=(0, 20), rounds=8)
QUICK = Plan(sizes={512: "384M"}, loads=(0, 20), rounds=2, budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """Lists the moves that `plan` omits from the full plan."""
    lines = [f"guests of {size(mib)}" for mib in FULL.sizes if mib not in plan.sizes]
    lines += [f"load of {load} MB/s" for load in FULL.loads if load not in plan.loads]
    if plan.rounds < FULL.rounds:
        lines.append(f"moves in each way: {plan.rounds} of {FULL.rounds}")
    return lines
