"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of OS reboots."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from rekindle_bench.omissions import fewer

from .rows import PEERS, WAYS

GUESTS = {
    "micro": ("cold", "warm-cache", "phase-kernel", "phase-services"),
    "debian": ("cold", "warm-cache", "kexec", "phase-kernel"),
    "immutable": WAYS,
}
"""Ways of each guest. micro has no systemd and no kexec; debian writes its root, so only its early phase is usable."""
LEAKS = {
    "micro": ("cold", "warm-cache", "phase-kernel", "phase-services"),
    "immutable": ("cold", "warm-cache", "kexec", "phase-kernel", "phase-services"),
}
"""Ways of each guest in the case `leak`."""


@dataclass(frozen=True)
class Plan:
    """Repetitions of each case."""

    rounds: dict[str, int]
    """Reboots of each way, by guest."""
    leaks: dict[str, int]
    """Reboots of each way after a leak, by guest."""
    peers: dict[str, int]
    """Restarts by each peer, by guest."""
    memory_mib: int = 512
    """RAM of the guests, in MiB."""
    leak_mib: int = 64
    """Kernel memory that is leaked, in MiB."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(
    rounds={"micro": 12, "debian": 10, "immutable": 12},
    leaks={"micro": 5, "immutable": 3},
    peers={"micro": 10, "immutable": 6},
)

QUICK = Plan(
    rounds={"micro": 2, "debian": 0, "immutable": 1},
    leaks={"micro": 1, "immutable": 0},
    peers={"micro": 2, "immutable": 0},
    budget_s=330.0,
)


def quick(only: Collection[str]) -> Plan:
    """Returns the quick plan, with one repetition of each case that `only` names and the quick plan omits."""

    def at_least_once(counts: dict[str, int], case: str | None) -> dict[str, int]:
        """Raises the counts to 1 if `only` names the case. `case`: `None` if each guest is a case of its own."""
        return {guest: max(count, int((case or guest) in only)) for guest, count in counts.items()}

    return replace(
        QUICK,
        rounds=at_least_once(QUICK.rounds, None),
        leaks=at_least_once(QUICK.leaks, "leak"),
        peers=at_least_once(QUICK.peers, "peers"),
    )


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    return [
        *_fewer_by_guest("reboots of each way", plan.rounds, FULL.rounds),
        *_fewer_by_guest("reboots of each way after a leak", plan.leaks, FULL.leaks),
        *_fewer_by_guest(f"restarts by each of {', '.join(PEERS)}", plan.peers, FULL.peers),
    ]


def _fewer_by_guest(what: str, own: dict[str, int], full: dict[str, int]) -> list[str]:
    """Returns a line for each guest with fewer repetitions than in the full plan."""
    lines: list[str] = []
    for guest, count in full.items():
        lines += fewer(f"{guest}: {what}", own.get(guest, 0), count)
    return lines
