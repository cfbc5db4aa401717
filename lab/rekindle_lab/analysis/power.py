"""How many runs a level needs to detect a difference (`smallest_n`), as in section 4.3 of the paper.

- Power: the probability that the analysis of variance detects a difference of a given size.
- Cohen's f: that size, the standard deviation of the levels' means over the standard deviation within a level.
- Alpha: the accepted probability of a false difference.
"""

import math

from scipy import stats

MAX_RUNS_PER_LEVEL = 100_000
"""A search for a number of runs ends with an error above this number."""


def effect_from_sd_increase(increase: float) -> float:
    """Returns the Cohen's f of levels whose differences raise the standard deviation of a value by this share.

    This is Montgomery's definition, used in the paper: 0.15 is a standard deviation of 1.15 times that within a level.
    """
    if not 0 < increase < math.inf:
        raise ValueError(f"the increase of the standard deviation is {increase:g}; it must be more than 0")
    return math.sqrt((1 + increase) ** 2 - 1)


def power(n: int, levels: int, effect: float, alpha: float = 0.05) -> float:
    """Returns the power of a one-way analysis of variance with `n` runs per level, for a Cohen's f of `effect`.

    With such a difference, F has the noncentral distribution with noncentrality f² times the number of runs (Cohen,
    Statistical Power Analysis for the Behavioral Sciences, chapter 8).
    """
    if n < 2 or levels < 2:
        raise ValueError(f"power needs at least 2 levels of 2 runs, not {levels} of {n}")
    df, df_error = levels - 1, levels * (n - 1)
    critical_f = stats.f.isf(alpha, df, df_error)
    noncentrality = effect**2 * levels * n
    return float(stats.ncf.sf(critical_f, df, df_error, noncentrality))


def smallest_n(levels: int, effect: float, alpha: float = 0.05, wanted: float = 0.90) -> int:
    """Returns the smallest number of runs per level with a power of at least `wanted`."""
    if not 0 < wanted < 1 or not 0 < alpha < 1:
        raise ValueError("alpha and power must be between 0 and 1")
    # Doubles until the power is enough, then bisects: power grows with the number of runs.
    low, high = 2, 2
    while power(high, levels, effect, alpha) < wanted:
        low, high = high + 1, high * 2
        if high > MAX_RUNS_PER_LEVEL:
            raise ValueError(f"an effect of {effect:g} would need more than {MAX_RUNS_PER_LEVEL} runs a level")
    while low < high:
        middle = (low + high) // 2
        if power(middle, levels, effect, alpha) < wanted:
            low = middle + 1
        else:
            high = middle
    return high
