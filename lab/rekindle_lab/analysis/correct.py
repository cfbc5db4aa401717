"""Corrections for several responses judged at once, so that a false alarm in any is as rare as in a single one."""

from collections.abc import Sequence


def bonferroni(p: Sequence[float]) -> list[float]:
    """Each p times their number: what the paper did, who divided alpha instead."""
    return [min(1.0, value * len(p)) for value in p]


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: never larger than Bonferroni's, and as safe."""
    out = [0.0] * len(p)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, p[index] * (len(p) - rank)))
        out[index] = highest
    return out
