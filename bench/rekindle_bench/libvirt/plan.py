"""The full plan, and the quick plan of 8 minutes: repetitions and sizes of replacements of libvirt domains."""

from dataclasses import dataclass

from rekindle_lab.guests import size


@dataclass(frozen=True)
class Checkpoints:
    """Repetitions of case `pause` for guests of one size."""

    rounds: int
    checkpoints: int
    """Checkpoints of each guest in a round, in addition to the first one, which has all memory."""


@dataclass(frozen=True)
class Plan:
    """Number of replacements in each case, by MiB of RAM where it has several sizes. All RAM is touched."""

    firsts: dict[int, int]
    """First replacements, each of a freshly started domain."""
    agains: dict[int, int]
    """Further replacements of one domain, and as many of a VM of Rekindle's, in turn."""
    saves: dict[int, int]
    """Replacements of one domain, and as many by `virsh managedsave` and `virsh start`, in turn."""
    away_domains: int
    """Number of domains that one command replaces."""
    away_rounds: int
    """Number of such commands. The first one is the first replacement of each domain."""
    away_mib: int
    """RAM of each of these domains."""
    pauses: dict[int, Checkpoints]
    """Checkpoints of attached domains and of a VM of Rekindle's, in turn."""
    works_rounds: int
    """How often each of libvirt's operations is tried on a domain that was replaced, and on one that was not."""
    works_mib: int
    """RAM of these domains."""
    overlay_rounds: int
    """Rounds of case `overlays`; 0 leaves it out."""
    overlay_mib: int
    """Size of each disk that the guest writes in the cases `overlays` and `epochs`, in MiB."""
    overlay_write_s: int
    """Seconds for which the guest writes each time."""
    epochs: int
    """Checkpoints under verified writes; 0 leaves the case out."""
    restores: dict[int, int]
    """Restores into libvirt."""
    losses: int
    """Replacements of one domain with clients at it, each by the next version of QEMU."""
    losses_mib: int
    """RAM of that domain."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(
    firsts={512: 10, 2048: 20, 8192: 5},
    agains={512: 10, 2048: 20, 8192: 10},
    saves={512: 5, 2048: 8, 8192: 2},
    away_domains=10,
    away_rounds=6,
    away_mib=256,
    pauses={512: Checkpoints(6, 10), 2048: Checkpoints(3, 10)},
    works_rounds=3,
    works_mib=256,
    overlay_rounds=6,
    overlay_mib=256,
    overlay_write_s=20,
    epochs=1000,
    restores={512: 5, 2048: 10},
    losses=50,
    losses_mib=512,
)
QUICK = Plan(
    firsts={512: 2, 2048: 4},
    agains={2048: 6},
    saves={2048: 2},
    away_domains=10,
    away_rounds=2,
    away_mib=256,
    pauses={512: Checkpoints(2, 6)},
    works_rounds=1,
    works_mib=256,
    overlay_rounds=1,
    overlay_mib=256,
    overlay_write_s=10,
    epochs=30,
    restores={2048: 2},
    losses=6,
    losses_mib=512,
    budget_s=390.0,
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    lines: list[str] = []

    def compare(what: str, full: dict[int, int], own: dict[int, int]) -> None:
        """Adds the sizes of which `own` has none, and those of which it has fewer."""
        for mib, count in full.items():
            if own.get(mib, 0) == 0:
                lines.append(f"{what}, {size(mib)}: all of it")
            elif own[mib] < count:
                lines.append(f"{what}, {size(mib)}: {own[mib]} of {count}")

    def pauses(of: Plan) -> dict[int, int]:
        return {mib: wanted.rounds * wanted.checkpoints for mib, wanted in of.pauses.items()}

    compare("first replacements", FULL.firsts, plan.firsts)
    compare("further replacements", FULL.agains, plan.agains)
    compare("managedsave", FULL.saves, plan.saves)
    compare("restores into libvirt", FULL.restores, plan.restores)
    compare("checkpoints", pauses(FULL), pauses(plan))
    if plan.away_rounds < FULL.away_rounds:
        lines.append(f"{FULL.away_domains} domains in one command: {plan.away_rounds} of {FULL.away_rounds}")
    if plan.overlay_rounds < FULL.overlay_rounds:
        lines.append(f"disk writes with overlays: {plan.overlay_rounds} of {FULL.overlay_rounds} rounds")
    if plan.epochs < FULL.epochs:
        lines.append(f"checkpoints under verified writes: {plan.epochs} of {FULL.epochs}")
    if plan.losses < FULL.losses:
        lines.append(f"replacements with clients: {plan.losses} of {FULL.losses}")
    if plan.works_rounds < FULL.works_rounds:
        lines.append(f"libvirt's operations: {plan.works_rounds} of {FULL.works_rounds} rounds")
    return lines
