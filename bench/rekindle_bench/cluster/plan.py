"""The full and the quick plan: number of faults in each case, and repetitions for the cost of output commit.

With *output commit*, network output of a guest is held until the checkpoint after it is durable. So a client never sees
what a fail-over would undo, but waits longer for each answer.
"""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer


@dataclass(frozen=True)
class Plan:
    """Repetitions of each case."""

    failovers: int
    """Kills of the node that runs the guest, without output commit. The time of each fail-over is measured."""
    random_faults: int
    """Kills, stops, partitions and outages of the store, drawn at random, without output commit."""
    output_commit_faults: int
    """Faults with output commit (case `held`): no tick that a client has seen may be lost."""
    control_kills: int
    """Kills without output commit, at the checkpoint interval of `output_commit_faults` (case `held-off`). They must
    lose ticks; otherwise the check of those faults detects nothing."""
    output_rounds: int
    """Measurements without checkpoints, with checkpoints alone, and with output commit (case `output`)."""
    output_intervals_s: tuple[float, ...]
    """Checkpoint intervals of these measurements."""
    budget_s: float | None = None
    """No case or fault begins later than this many seconds after the start."""
    round_trip_window_s: float = 6.0
    """How long round trips are measured in each measurement of `output`."""
    throughput_window_s: float = 4.0
    """How long answers are counted in each measurement of `output`."""


FULL = Plan(
    failovers=20,
    random_faults=100,
    output_commit_faults=20,
    control_kills=5,
    output_rounds=6,
    output_intervals_s=(0.05, 0.2, 1.0),
)
QUICK = Plan(
    failovers=2,
    random_faults=2,
    output_commit_faults=1,
    control_kills=1,
    output_rounds=2,
    output_intervals_s=(0.2,),
    budget_s=400.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    intervals_s = (interval_s for interval_s in FULL.output_intervals_s if interval_s not in plan.output_intervals_s)
    omitted = [f"{interval_s:g} s" for interval_s in intervals_s]
    control = "fail-overs at that interval without output commit"
    return [
        *fewer("fail-overs", plan.failovers, FULL.failovers),
        *fewer("faults at random", plan.random_faults, FULL.random_faults),
        *fewer("faults with output commit", plan.output_commit_faults, FULL.output_commit_faults),
        *fewer(control, plan.control_kills, FULL.control_kills),
        *fewer("turns of what output commit costs", plan.output_rounds, FULL.output_rounds),
        *([f"what output commit costs with a checkpoint every {', '.join(omitted)}"] if omitted else []),
    ]
