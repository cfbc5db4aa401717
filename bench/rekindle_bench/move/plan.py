"""The full plan, and the quick plan of 8 minutes: repetitions, sizes and loads of moves."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer
from rekindle_lab.guests import size


@dataclass(frozen=True)
class Plan:
    """Sizes and loads of the guests, and repetitions of each move."""

    filled_by_mib: dict[int, str]
    """How much of its RAM the guest fills, such as `384M`, by MiB of RAM."""
    loads_mb_per_s: tuple[int, ...]
    """How much of its memory the guest writes while it is moved, in MB/s."""
    rounds: int
    """Moves by each way (see `rows.HOWS`) at each size and load."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(filled_by_mib={512: "384M", 2048: "1536M"}, loads_mb_per_s=(0, 20), rounds=8)
QUICK = Plan(filled_by_mib={512: "384M"}, loads_mb_per_s=(0, 20), rounds=2, budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """Lists the moves that `plan` omits from the full plan."""
    return [
        *[f"guests of {size(mib)}" for mib in FULL.filled_by_mib if mib not in plan.filled_by_mib],
        *[f"load of {load} MB/s" for load in FULL.loads_mb_per_s if load not in plan.loads_mb_per_s],
        *fewer("moves in each way", plan.rounds, FULL.rounds),
    ]
