"""The full plan, and the quick plan of 8 minutes: repetitions of commits, restores and races."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer


@dataclass(frozen=True)
class Plan:
    """Sizes and repetitions."""

    commits: int
    """Commits, and as many PUTs."""
    commit_bytes: int
    """Size of the pages of a commit, in bytes."""
    restores: int
    """Restores from each kind of store."""
    memory_mib: int
    """RAM of the guest that is restored, in MiB."""
    touch: str
    """How much of its RAM the guest fills, such as `384M`."""
    races: int
    """Races of two hosts for a store."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(commits=20, commit_bytes=46_000_000, restores=20, memory_mib=512, touch="384M", races=10_000)
QUICK = Plan(commits=8, commit_bytes=46_000_000, restores=6, memory_mib=512, touch="384M", races=500, budget_s=400.0)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    return [
        *fewer("commits", plan.commits, FULL.commits),
        *fewer("restores from each kind of store", plan.restores, FULL.restores),
        *fewer("races", plan.races, FULL.races),
    ]
