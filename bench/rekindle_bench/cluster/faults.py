"""Random faults of the cluster: kind, target, duration."""

import random
from dataclasses import dataclass

KINDS = (
    "kill",
    "freeze",
    "cut",
    "cut-ring",
    "store-stop",
    "store-freeze",
    "store-cut",
    "kill-other",
    "kill-store-away",
)
"""The node with the guest: killed, all its processes stopped, its cable pulled, isolated from the other nodes only.
The store: killed, stopped, isolated. Another node: killed. The node with the guest killed while the store is
unavailable: the store returns some seconds later, and the guest has to run again without intervention."""
KILLS = ("kill", "kill-store-away")
"""Kinds of faults after which the guest must run in another QEMU."""
PASSING = {
    "freeze": ("freeze", "thaw"),
    "cut": ("cut", "heal"),
    "cut-ring": ("cut-ring", "heal-ring"),
    "store-stop": ("store stop", "store start"),
    "store-freeze": ("store freeze", "store thaw"),
    "store-cut": ("store cut", "store heal"),
}
"""The steps that begin and end a temporary fault."""
LONGEST_S = 8.0
"""Longest duration of a temporary fault, in s."""


@dataclass(frozen=True)
class Fault:
    """One fault, drawn from a seed."""

    kind: str
    """A member of `KINDS`."""
    lasts_s: float
    """Duration of a temporary fault."""
    wait_s: float
    """Delay in s after the cluster has settled, so that the fault may hit any moment of a checkpoint."""
    lead_s: float = 0.0
    """For `kill-store-away`: seconds from the store's failure to the node's death, when `lasts_s` starts."""


def draw(seed: int) -> Fault:
    """Draws the fault of a seed."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    # The range has times both shorter and longer than the token timeout of Corosync.
    lasts = chance.uniform(0.2, LONGEST_S) if kind in (*PASSING, "kill-store-away") else 0.0
    wait = chance.uniform(0.0, 2.0)
    return Fault(
        kind, lasts_s=lasts, wait_s=wait, lead_s=chance.uniform(0.2, 2.0) if kind == "kill-store-away" else 0.0
    )


def words(step: str, node: str) -> list[str]:
    """Returns the arguments for `tests/cluster/bed`."""
    return step.split() if step.startswith("store ") else [step, node]
