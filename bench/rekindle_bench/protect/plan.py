"""The full plan, and the quick plan of 8 minutes: repetitions, sizes and intervals of checkpoints."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer, missing
from rekindle_lab.guests import size


@dataclass(frozen=True)
class Units:
    """Amount of each workload in a window: takes 15 to 30 s on a machine without KVM."""

    compile: int = 45
    transcode: int = 200

    def of(self, workload: str) -> int:
        """Returns the number of files (`compile`) or frames (`transcode`)."""
        return {"compile": self.compile, "transcode": self.transcode}[workload]


@dataclass(frozen=True)
class Pause:
    """Rounds at one size; in each round, the checkpoints of each policy and the saves of each peer."""

    rounds: int
    """Number of rounds."""
    checkpoints: int
    """Checkpoints of each policy in a round."""
    saves: dict[str, int]
    """Saves in a round, by peer."""
    touch: str | None = None
    """Memory that the guest fills before, such as `1G`: a larger guest has more memory in use."""


@dataclass(frozen=True)
class Plan:
    """Repetitions and settings of each case."""

    units: Units
    """Amount of work in each window."""
    pauses_by_mib: dict[int, Pause]
    """Rounds of `pause` by MiB of RAM."""
    intervals_s: tuple[float, ...]
    """Checkpoint intervals of the case `intervals`."""
    cells: tuple[tuple[str, str, str], ...]
    """(store, workload, policy) of each cell for which every interval is measured."""
    pairs_by_workload: dict[str, int]
    """Pairs of windows, one with and one without protection, by workload."""
    rates: tuple[tuple[float, float], ...]
    """MB/s that the guest writes, and MB of the written area; a rate of 0 is an idle guest."""
    rate_checkpoints: int
    """Checkpoints at each rate."""
    commits: int
    """Commits of 46 MB, by turns with dd."""
    encrypted_commits: int
    """Commits of 46 MB into an encrypted store, by turns with one that is not encrypted."""
    compared_checkpoints: int
    """Checkpoints that precede the comparison of all memory."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


_SAVES = {"background-snapshot": 4, "mapped-ram": 2, "full": 1}
_WORKLOADS = ("compile", "transcode")
_DISK_CELLS = tuple(("disk", workload, policy) for workload in _WORKLOADS for policy in ("default", "cow", "basic"))
_OTHER_CELLS = tuple((store, workload, "default") for store in ("slow", "s3") for workload in _WORKLOADS)

FULL = Plan(
    units=Units(),
    pauses_by_mib={
        512: Pause(rounds=4, checkpoints=4, saves=_SAVES),
        2048: Pause(rounds=4, checkpoints=4, saves=_SAVES, touch="1G"),
        8192: Pause(rounds=1, checkpoints=4, saves=_SAVES, touch="2G"),
    },
    intervals_s=(10.0, 5.0, 2.0, 1.0, 0.25),
    cells=(*_DISK_CELLS, *_OTHER_CELLS),
    pairs_by_workload={"compile": 10, "transcode": 10},
    rates=((0.0, 0.0), (10.0, 128.0), (50.0, 128.0), (200.0, 128.0)),
    rate_checkpoints=8,
    commits=10,
    encrypted_commits=20,
    compared_checkpoints=1000,
)

QUICK = Plan(
    units=Units(compile=20, transcode=80),
    pauses_by_mib={512: Pause(rounds=1, checkpoints=4, saves={"background-snapshot": 4, "mapped-ram": 1, "full": 1})},
    intervals_s=(2.0, 0.25),
    cells=(("disk", "compile", "default"), ("disk", "compile", "cow"), ("disk", "compile", "basic")),
    pairs_by_workload={"compile": 2},
    rates=((0.0, 0.0), (50.0, 64.0)),
    rate_checkpoints=3,
    commits=3,
    encrypted_commits=3,
    compared_checkpoints=100,
    budget_s=400.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    lines: list[str] = []
    for mib, full in FULL.pauses_by_mib.items():
        own = plan.pauses_by_mib.get(mib)
        if own is None:
            lines.append(f"pause at {size(mib)}: all of it")
        elif own != full:
            lines.append(f"pause at {size(mib)}: {own.rounds} rounds of {full.rounds}")
    lines += missing("intervals", map(_interval, plan.intervals_s), map(_interval, FULL.intervals_s))
    lines += missing("intervals for", map(" ".join, plan.cells), map(" ".join, FULL.cells))
    if plan.units != FULL.units:
        lines.append(
            f"length of a window: {plan.units.compile} files of {FULL.units.compile}, "
            f"{plan.units.transcode} frames of {FULL.units.transcode}"
        )
    for workload, pairs in FULL.pairs_by_workload.items():
        lines += fewer(f"slowdown of {workload}", plan.pairs_by_workload.get(workload, 0), pairs, unit=" pairs")
    lines += missing("memory written at", map(_write_rate, plan.rates), map(_write_rate, FULL.rates))
    lines += fewer("commits against dd", plan.commits, FULL.commits)
    lines += fewer("commits with encryption", plan.encrypted_commits, FULL.encrypted_commits)
    lines += fewer("checkpoints before memory is compared", plan.compared_checkpoints, FULL.compared_checkpoints)
    return lines


def _interval(interval_s: float) -> str:
    return f"{interval_s:g} s"


def _write_rate(rate: tuple[float, float]) -> str:
    mb_per_s, area_mb = rate
    return f"{mb_per_s:g} MB/s over {area_mb:g} MB"
