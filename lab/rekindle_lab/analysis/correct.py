"""Corrects the p of several responses judged together, so that any false alarm is as rare as in a single test.

With six responses and a threshold of 0.05 for each, chance alone would report a difference in a quarter of all
experiments.
"""

from collections.abc import Sequence


def bonferroni(p_values: Sequence[float]) -> list[float]:
    """Multiplies each p by the number of p, as the paper did (it divided alpha instead)."""
    return [min(1.0, p * len(p_values)) for p in p_values]


def holm(p_values: Sequence[float]) -> list[float]:
    """Applies Holm's step-down correction (Scand. J. Statistics 6, 1979): never above Bonferroni's, same guarantee.

    Multiplies the smallest of n p by n, the next by n - 1, ...; a corrected p is never below that of a smaller p.
    """
    corrected = [0.0] * len(p_values)
    largest_so_far = 0.0
    ascending = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(ascending):
        largest_so_far = max(largest_so_far, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = largest_so_far
    return corrected
