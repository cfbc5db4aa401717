"""Corrections for several responses judged together, so that any false alarm is as rare as in a single test."""

from collections.abc import Sequence


def bonferroni(p: Sequence[float]) -> list[float]:
    """Multiplies each p by the number of p, as the paper did (it divided alpha instead)."""
    return [min(1.0, value * len(p)) for value in p]


def holm(p: Sequence[float]) -> list[float]:
    """Applies Holm's step-down correction: never larger than Bonferroni's, with the same guarantee."""
    out = [0.0] * len(p)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        highest = max(highest, min(1.0, p[index] * (len(p) - rank)))
        out[index] = highest
    return out
