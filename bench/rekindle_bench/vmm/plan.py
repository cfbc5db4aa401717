"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of VMM reboots."""

from dataclasses import dataclass

from rekindle_lab.guests import size

SMALLEST_MIB, LARGEST_MIB = 512, 8192


@dataclass(frozen=True)
class Plan:
    """Repetitions by way to reboot, for each size and number of guests."""

    ram: dict[int, dict[str, int]]
    """Repetitions of each way by MiB of RAM, all of it touched."""
    sizes: int
    """Warm reboots of the smallest and of the largest guest, in turn."""
    count: dict[int, dict[str, int]]
    """Repetitions of each way by number of small VMs, rebooted in parallel."""
    debian: dict[str, int]
    """Repetitions of each way with one VM that has systemd, nginx and PostgreSQL."""
    losses: int
    """Warm reboots in a row, under load."""
    memory: int
    """Warm reboots in which all RAM blocks are compared."""
    breakdown: tuple[str, ...]
    """Ways for which throughput over time is recorded, once each."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""
    extremes: tuple[int, int] = (SMALLEST_MIB, LARGEST_MIB)
    """RAM of the smallest and of the largest guest in MiB."""


FULL = Plan(
    ram={
        512: {"warm": 20, "cpr-transfer": 20, "saved": 5, "cold": 3},
        2048: {"warm": 12, "cpr-transfer": 12, "saved": 5, "cold": 2},
        8192: {"warm": 12, "cpr-transfer": 12, "saved": 2, "cold": 1},
    },
    sizes=15,
    count={n: {"warm": 10, "cpr-transfer": 10, "saved": 2, "cold": 1} for n in (1, 2, 4, 8, 11)},
    debian={"warm": 10, "cpr-transfer": 10, "saved": 3, "cold": 3},
    losses=50,
    memory=5,
    breakdown=("warm", "cpr-transfer", "saved", "cold"),
)

QUICK = Plan(
    ram={
        512: {"warm": 12, "cpr-transfer": 12, "saved": 1, "cold": 1},
        2048: {"warm": 5, "cpr-transfer": 0, "saved": 2, "cold": 0},
    },
    sizes=8,
    count={
        1: {"warm": 5, "cpr-transfer": 5, "saved": 1, "cold": 0},
        11: {"warm": 5, "cpr-transfer": 0, "saved": 1, "cold": 0},
    },
    debian={"warm": 0, "cpr-transfer": 0, "saved": 0, "cold": 0},
    losses=10,
    memory=2,
    breakdown=("warm", "saved", "cold"),
    budget_s=390.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    lines: list[str] = []

    def compare(what: str, full: dict[str, int], own: dict[str, int]) -> None:
        """Adds the ways of which `own` has no repetitions, and those of which it has fewer."""
        omitted = [how for how, n in full.items() if own.get(how, 0) == 0 and n]
        fewer = [f"{how} {own[how]} of {n}" for how, n in full.items() if 0 < own.get(how, 0) < n]
        if len(omitted) == len(full):
            lines.append(f"{what}: all of it")
        elif omitted:
            lines.append(f"{what}: {', '.join(omitted)}")
        if fewer:
            lines.append(f"{what}: repetitions ({', '.join(fewer)})")

    for mib, full in FULL.ram.items():
        compare(f"micro with {size(mib)}", full, plan.ram.get(mib, {}))
    for n, full in FULL.count.items():
        compare(f"{n} small VM{'s' if n > 1 else ''}", full, plan.count.get(n, {}))
    compare("debian", FULL.debian, plan.debian)
    if plan.sizes < FULL.sizes:
        lines.append(f"smallest against largest guest: {plan.sizes} reboots of {FULL.sizes}")
    if plan.losses < FULL.losses:
        lines.append(f"reboots in a row under load: {plan.losses} of {FULL.losses}")
    if plan.memory < FULL.memory:
        lines.append(f"reboots with memory compared: {plan.memory} of {FULL.memory}")
    missing = [how for how in FULL.breakdown if how not in plan.breakdown]
    if missing:
        lines.append(f"throughput over time: {', '.join(missing)}")
    return lines
