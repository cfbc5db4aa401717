"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of OS reboots."""

from collections.abc import Collection
from dataclasses import dataclass, replace

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
    leak_mib: int = 64
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
    lines = []
    for what, own, full in (
        ("reboots of each way", plan.rounds, FULL.rounds),
        ("reboots of each way after a leak", plan.leaks, FULL.leaks),
        (f"restarts by each of {', '.join(PEERS)}", plan.peers, FULL.peers),
    ):
        for guest, number in full.items():
            if own.get(guest, 0) < number:
                lines.append(f"{guest}: {what}: {own.get(guest, 0)} of {number}")
    return lines
