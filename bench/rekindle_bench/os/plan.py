"""What a run measures: repetitions and sizes; in full, and within 8 minutes."""

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


@dataclass(frozen=True)
class Plan:
    """Repetitions."""

    rounds: dict[str, int]
    """Reboots of each way, by guest."""
    leaks: dict[str, int]
    """The same, each after a leak."""
    peers: dict[str, int]
    """Restarts by each peer."""
    memory_mib: int = 512
    leak_mib: int = 64
    budget_s: float | None = None
    """A case that would begin later than this is left out."""


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
    """Returns the quick plan, plus one of each of a case that is named and that it would omit."""

    def once(own: dict[str, int], case: str | None) -> dict[str, int]:
        wanted = {name for name in own if (case or name) in only}
        return {name: max(count, 1) if name in wanted else count for name, count in own.items()}

    return replace(
        QUICK, rounds=once(QUICK.rounds, None), leaks=once(QUICK.leaks, "leak"), peers=once(QUICK.peers, "peers")
    )


def left_out(plan: Plan) -> list[str]:
    """Lists what this plan omits from the full one."""
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
