"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of restores."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer, fewer_of_ways, missing
from rekindle_bench.protect.plan import Units
from rekindle_lab.guests import size


@dataclass(frozen=True)
class Piece:
    """A piece of work that is interrupted by a crash and a restore."""

    count: int
    """Number of units: files (`compile`) or frames (`transcode`)."""
    units_before_crash: int
    """Number of units that are finished before the crash."""
    first: int = 1
    """Number of the first unit. Earlier units are left out, which shortens only the part before the crash."""


@dataclass(frozen=True)
class Plan:
    """Repetitions of each case."""

    ways_by_mib: dict[int, dict[str, int]]
    """Restores by MiB of RAM and way (see `rows.HOWS`)."""
    touch: dict[int, str]
    """Memory that a guest fills, such as `1G`, by MiB of its RAM: a larger guest has more memory in use."""
    stores: tuple[str, ...]
    """Kinds of store for figure 4. The 512M guest is restored lazily from each kind."""
    store_restores: int
    """Restores from each store."""
    prepared_restores: int
    """Restores into a prepared QEMU, and as many without one."""
    crashes_by_workload: dict[str, int]
    """Windows with a crash and a restore, and as many without, by workload."""
    pieces: dict[str, Piece]
    """The work in the windows of `after`, by workload."""
    units: Units
    """Amount of the work that continues on another host, interrupted in the middle."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(
    ways_by_mib={
        512: {"lazy": 20, "eager": 8, "incoming": 8},
        2048: {"lazy": 8, "eager": 3, "incoming": 3},
        8192: {"lazy": 20, "eager": 2, "incoming": 2},
    },
    touch={2048: "1G", 8192: "2G"},
    stores=("disk", "slow", "s3"),
    store_restores=6,
    prepared_restores=16,
    crashes_by_workload={"compile": 3, "transcode": 4},
    pieces={
        "compile": Piece(count=676, units_before_crash=20, first=636),
        "transcode": Piece(count=2400, units_before_crash=500),
    },
    units=Units(compile=100, transcode=400),
)

QUICK = Plan(
    ways_by_mib={512: {"lazy": 6, "eager": 2, "incoming": 2}, 8192: {"lazy": 6, "eager": 0, "incoming": 0}},
    touch={8192: "512M"},
    stores=("disk",),
    store_restores=3,
    prepared_restores=4,
    crashes_by_workload={"compile": 2},
    pieces={"compile": Piece(count=40, units_before_crash=20)},
    units=Units(compile=40, transcode=160),
    budget_s=400.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    lines: list[str] = []
    for mib, full in FULL.ways_by_mib.items():
        own = plan.ways_by_mib.get(mib, {})
        lines += fewer_of_ways(f"restores at {size(mib)}", own, full, "all")
        if own and plan.touch.get(mib) != FULL.touch.get(mib):
            lines.append(f"memory filled at {size(mib)}: {plan.touch.get(mib)} of {FULL.touch.get(mib)}")
    lines += missing("restores from", plan.stores, FULL.stores)
    lines += fewer("restores from each store", plan.store_restores, FULL.store_restores)
    lines += fewer("restores into a prepared QEMU", plan.prepared_restores, FULL.prepared_restores)
    for workload, crashes in FULL.crashes_by_workload.items():
        lines += fewer(f"second halves of {workload}", plan.crashes_by_workload.get(workload, 0), crashes)
    for workload, piece in plan.pieces.items():
        full_count = FULL.pieces[workload].count
        if piece.count < full_count:
            lines.append(f"length of a piece of work: {workload} {piece.count} of {full_count}")
    return lines
