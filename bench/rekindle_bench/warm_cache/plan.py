"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of warm-cache reboots."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer, fewer_of_ways
from rekindle_lab.slow import Limit

LIMITS = {"paper": Limit(bytes_per_s=90_000_000), "cloud": Limit(bytes_per_s=125_000_000, operations_per_s=3000)}
"""Rates of the paper's disk, and of a volume in a cloud."""


@dataclass(frozen=True)
class FileAccess:
    """One kind of access to a file, before and after reboots."""

    what: str
    """As in `Row.what`."""
    block: int
    """Bytes per request."""
    mib: int
    """Size of the file in MiB."""
    rounds: int
    """Reboots of each way."""


@dataclass(frozen=True)
class Plan:
    """Repetitions and settings of each case."""

    native_windows: int
    """Windows of each disk server and kind of request, without a guest."""
    native_s: float
    """Duration of such a window, in s."""
    retained_reads: int
    """Reads of the whole retained cache, without a guest."""
    files: tuple[FileAccess, ...]
    """Accesses to a file on ext4."""
    limits: tuple[str, ...]
    """Names in `LIMITS`. All but the first have fewer rounds."""
    folios: tuple[FileAccess, ...]
    """Accesses to a file on XFS."""
    peers: tuple[FileAccess, ...]
    """Accesses to a file with QEMU's own disk."""
    map_rounds: int
    """Pairs of accesses with and without a block map."""
    map_mib: int
    """Size of the file that is accessed in a pair, in MiB."""
    tpch_rounds: int
    """Reboots of each way with the TPC-H queries."""
    tpch_runs: int
    """Runs of all queries before each reboot, and as many after it."""
    http_rounds: int
    """Reboots of each way with a web server."""
    http_s: int
    """Seconds for which the web server is measured before each reboot, and as many after it."""
    kills: int
    """Kills of a disk's server."""
    sandbox_pairs: int
    """Pairs of guests, one with all sandboxes and one without any."""
    sandbox_rounds: dict[str, int]
    """Measurements of each guest of a pair, by what is measured: `vmm`, `disk`, `protect`, `restore`."""
    kill_every_s: float = 2.5
    """Seconds between two kills; longer than a server must run for its next restart to have no delay."""
    memory_mib: int = 2048
    """RAM of the guest that reads the file of 1 GiB, in MiB."""
    span_mib: int = 1024
    """Size of the disk that is accessed without a guest, in MiB."""
    web_files: int = 4000
    """Number of files that the client requests from the web server."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(
    native_windows=10,
    native_s=2.0,
    retained_reads=10,
    files=(
        FileAccess("read", block=4096, mib=1024, rounds=5),
        FileAccess("read", block=1 << 20, mib=1024, rounds=5),
        FileAccess("read", block=2048, mib=512, rounds=2),
        FileAccess("read", block=1024, mib=256, rounds=2),
        FileAccess("read", block=512, mib=128, rounds=2),
        FileAccess("write", block=4096, mib=256, rounds=2),
        FileAccess("write", block=2048, mib=256, rounds=2),
        FileAccess("write", block=1024, mib=256, rounds=2),
        FileAccess("write", block=512, mib=128, rounds=2),
        FileAccess("mmap-read", block=4096, mib=512, rounds=2),
        FileAccess("mmap-write", block=4096, mib=256, rounds=2),
    ),
    limits=("paper", "cloud"),
    folios=(FileAccess("read", block=1 << 20, mib=1024, rounds=5), FileAccess("read", block=4096, mib=1024, rounds=3)),
    peers=(FileAccess("read", block=4096, mib=1024, rounds=3), FileAccess("write", block=2048, mib=512, rounds=2)),
    map_rounds=16,
    map_mib=256,
    tpch_rounds=4,
    tpch_runs=2,
    http_rounds=3,
    http_s=30,
    kills=60,
    sandbox_pairs=4,
    sandbox_rounds={"vmm": 30, "disk": 10, "protect": 30, "restore": 15},
)

QUICK = Plan(
    native_windows=4,
    native_s=1.0,
    retained_reads=3,
    files=(FileAccess("read", block=4096, mib=1024, rounds=1), FileAccess("read", block=1 << 20, mib=1024, rounds=1)),
    limits=("paper",),
    folios=(),
    peers=(),
    map_rounds=3,
    map_mib=128,
    tpch_rounds=1,
    tpch_runs=1,
    http_rounds=1,
    http_s=15,
    kills=10,
    sandbox_pairs=1,
    sandbox_rounds={"vmm": 5, "disk": 3, "protect": 5, "restore": 3},
    budget_s=330.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    lines = [
        *fewer("native windows of each server", plan.native_windows, FULL.native_windows),
        *fewer("native reads from the retained cache", plan.retained_reads, FULL.retained_reads),
        *fewer("pairs of windows with and without map", plan.map_rounds, FULL.map_rounds),
        *fewer("reboots of each way with TPC-H", plan.tpch_rounds, FULL.tpch_rounds),
        *fewer("reboots of each way with a web server", plan.http_rounds, FULL.http_rounds),
        *fewer("kills of a disk's server", plan.kills, FULL.kills),
        *fewer("pairs of guests with and without sandboxes", plan.sandbox_pairs, FULL.sandbox_pairs),
        *fewer_of_ways("each pair with and without sandboxes", plan.sandbox_rounds, FULL.sandbox_rounds, "all"),
    ]
    rounds_by_access = {(file.what, file.block): file.rounds for file in plan.files}
    for file in FULL.files:
        rounds = rounds_by_access.get((file.what, file.block), 0)
        if rounds < file.rounds:
            lines.append(f"{file.what} of {file.block} bytes: {rounds} of {file.rounds} reboots of each way")
    lines += [f"limit of the disk: {name}" for name in FULL.limits if name not in plan.limits]
    if plan.folios != FULL.folios:
        lines.append("files on XFS")
    if plan.peers != FULL.peers:
        lines.append("peers: QEMU's own disk, cache=writeback and cache=none")
    return lines
