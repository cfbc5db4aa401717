"""What is done to the cluster at random: what, to whom, for how long."""

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
"""The node with the guest: killed, all its processes stopped, its cable pulled, cut off from the other nodes only.
The store: killed, stopped, cut off. Another node. And the node with the guest while the store is away, which comes back
some seconds later: the guest has to come back by itself."""
KILLS = ("kill", "kill-store-away")
"""After which the guest must run in another QEMU."""
PASSING = {
    "freeze": ("freeze", "thaw"),
    "cut": ("cut", "heal"),
    "cut-ring": ("cut-ring", "heal-ring"),
    "store-stop": ("store stop", "store start"),
    "store-freeze": ("store freeze", "store thaw"),
    "store-cut": ("store cut", "store heal"),
}
"""How those that pass begin and end."""
LONGEST_S = 8.0


@dataclass(frozen=True)
class Fault:
    """One of them."""

    kind: str
    lasts_s: float
    wait_s: float
    """After the cluster has settled: so that it may be at any moment of a checkpoint."""
    lead_s: float = 0.0
    """For `kill-store-away`: how long the store is away before the node is killed. `lasts_s` runs from there."""


def draw(seed: int) -> Fault:
    """The fault of a seed."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    # Shorter than a token, and longer.
    lasts = chance.uniform(0.2, LONGEST_S) if kind in (*PASSING, "kill-store-away") else 0.0
    wait = chance.uniform(0.0, 2.0)
    return Fault(kind, lasts, wait, chance.uniform(0.2, 2.0) if kind == "kill-store-away" else 0.0)


def words(step: str, node: str) -> list[str]:
    """What `cluster/bed` is called with."""
    return step.split() if step.startswith("store ") else [step, node]
