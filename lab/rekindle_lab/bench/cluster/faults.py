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
)
"""The node with the guest: killed, all its processes stopped, its cable pulled, cut off from the other nodes only.
The store: killed, stopped, cut off. And another node."""
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


def draw(seed: int) -> Fault:
    """The fault of a seed."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    # Shorter than a token, and longer.
    lasts = chance.uniform(0.2, LONGEST_S) if kind in PASSING else 0.0
    return Fault(kind, lasts, chance.uniform(0.0, 2.0))


def words(step: str, node: str) -> list[str]:
    """What `cluster/bed` is called with."""
    return step.split() if step.startswith("store ") else [step, node]
