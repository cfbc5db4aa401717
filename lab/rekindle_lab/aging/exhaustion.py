"""The time until a resource is used up, and whether that time justifies an alarm."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle_lab.aging.samples import METRICS, Series, thin
from rekindle_lab.aging.trend import LEAST, Trend, trend
from rekindle_lab.analysis.correct import holm

ALPHA = 0.01
"""An alarm requires a p, corrected for the number of series, below this."""
HORIZON_D = 28.0
"""An alarm requires exhaustion within this many days."""
LEAST_H = 24.0
"""An alarm requires a series of at least this many hours, since daily variation is not aging."""


@dataclass(frozen=True)
class Finding:
    """The judgement of one series. `left_low_s` and `left_high_s` are the interval of `left_s`."""

    series: Series
    trend: Trend | None
    p: float
    """p of the trend test, corrected for the number of series judged (Holm)."""
    worsens: bool
    """Whether the slope points towards exhaustion."""
    left_s: float | None
    """Seconds from the last sample to exhaustion; infinite if the limit is not approached, `None` without a limit."""
    left_low_s: float | None
    left_high_s: float | None
    alarm: bool
    why: str


def left_s(trend_: Trend, limit: float, slope: float, bad: int) -> float:
    """Returns the seconds until the limit is reached at a slope."""
    distance = (limit - trend_.level) * bad
    if distance <= 0:
        return 0.0
    return distance / (slope * bad) if slope * bad > 0 else math.inf


def judge(series: Sequence[Series], alpha: float = ALPHA, horizon_d: float = HORIZON_D) -> list[Finding]:
    """Judges all series of a host together."""
    trends = [_trend(one) for one in series]
    tested = {index: found.p for index, found in enumerate(trends) if found is not None}
    corrected = dict(zip(tested, holm([*tested.values()]), strict=True))
    return [
        _finding(one, found, corrected.get(index, 1.0), alpha, horizon_d)
        for index, (one, found) in enumerate(zip(series, trends, strict=True))
    ]


def _trend(series: Series) -> Trend | None:
    if series.hours < LEAST_H:
        return None
    seconds, values = thin(series)
    return trend(seconds, values) if values.size >= LEAST else None


def _finding(series: Series, found: Trend | None, p: float, alpha: float, horizon_d: float) -> Finding:
    if found is None:
        why = f"too short: {series.hours:.1f} h, {series.values.size} samples; a trend needs {LEAST_H:g} h and {LEAST}"
        return Finding(series, None, 1.0, False, None, None, None, False, why)
    bad = METRICS[series.metric]
    worsens = found.slope * bad > 0
    if series.limit is None:
        return Finding(series, found, p, worsens, None, None, None, worsens and p < alpha, "no limit is known")
    fast, slow = (found.slope_high, found.slope_low) if bad > 0 else (found.slope_low, found.slope_high)
    left, low, high = (left_s(found, series.limit, slope, bad) for slope in (found.slope, fast, slow))
    clear = worsens and p < alpha
    soon = low <= horizon_d * 86_400
    why = "clear, and soon" if clear and soon else "clear, but far off" if clear else "no clear trend"
    return Finding(series, found, p, worsens, left, low, high, clear and soon, why)
