"""Judges series of samples: computes the time until a resource is used up, and whether that justifies an alarm.

Aging: software that runs for long uses up a resource, such as memory by a leak. A series is the samples of one metric
since the last boot; its limit is the value at which the resource is used up.

Entry point: `judge`, for all series of one host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle_lab.aging.samples import METRICS, Series, thin
from rekindle_lab.aging.trend import MIN_POINTS, Trend, fit_trend
from rekindle_lab.analysis.correct import holm

DAY_S = 86_400
ALPHA = 0.01
"""An alarm requires a p, corrected for the number of series, below this."""
HORIZON_D = 28.0
"""An alarm requires exhaustion within this many days."""
MIN_SERIES_H = 24.0
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
    alarm: bool
    why: str
    """The reason for an alarm, or for none."""
    left_s: float | None = None
    """Seconds from the last sample to exhaustion; infinite if the limit is not approached, `None` without a limit."""
    left_low_s: float | None = None
    left_high_s: float | None = None


def judge(all_series: Sequence[Series], alpha: float = ALPHA, horizon_d: float = HORIZON_D) -> list[Finding]:
    """Judges all series of a host together. An alarm needs p below `alpha`, and exhaustion within `horizon_d` days."""
    trends = [_trend_if_long_enough(series) for series in all_series]
    p_by_index = {index: trend.p for index, trend in enumerate(trends) if trend is not None}
    corrected_p = dict(zip(p_by_index, holm([*p_by_index.values()]), strict=True))
    return [
        _judge_long_series(series, trend, corrected_p[index], alpha, horizon_d)
        if trend is not None
        else _reject_short_series(series)
        for index, (series, trend) in enumerate(zip(all_series, trends, strict=True))
    ]


def _trend_if_long_enough(series: Series) -> Trend | None:
    if series.hours < MIN_SERIES_H:
        return None
    thinned = thin(series)
    return fit_trend(thinned.seconds, thinned.values) if thinned.values.size >= MIN_POINTS else None


def _reject_short_series(series: Series) -> Finding:
    why = f"too short: {series.hours:.1f} h, {series.values.size} samples; "
    why += f"a trend needs {MIN_SERIES_H:g} h and {MIN_POINTS}"
    return Finding(series, trend=None, p=1.0, worsens=False, alarm=False, why=why)


def _judge_long_series(series: Series, trend: Trend, p: float, alpha: float, horizon_d: float) -> Finding:
    worse_sign = METRICS[series.metric]
    worsens = trend.slope * worse_sign > 0
    is_clear = worsens and p < alpha
    if series.limit is None:
        left_s = earliest_s = latest_s = None
        alarm, why = is_clear, "no limit is known"
    else:
        # The ends of the slope's interval, by how fast they lead to exhaustion.
        steepest, flattest = trend.slope_high, trend.slope_low
        if worse_sign < 0:
            steepest, flattest = flattest, steepest
        left_s = _seconds_to_limit(trend.level, series.limit, trend.slope, worse_sign)
        earliest_s = _seconds_to_limit(trend.level, series.limit, steepest, worse_sign)
        latest_s = _seconds_to_limit(trend.level, series.limit, flattest, worse_sign)
        alarm = is_clear and earliest_s <= horizon_d * DAY_S
        why = "clear, and soon" if alarm else "clear, but far off" if is_clear else "no clear trend"
    return Finding(
        series,
        trend,
        p,
        worsens=worsens,
        alarm=alarm,
        why=why,
        left_s=left_s,
        left_low_s=earliest_s,
        left_high_s=latest_s,
    )


def _seconds_to_limit(level: float, limit: float, slope: float, worse_sign: int) -> float:
    """Returns when a series at `level` reaches the limit; infinite if `slope` does not lead there."""
    distance, speed = (limit - level) * worse_sign, slope * worse_sign
    if distance <= 0:
        return 0.0
    return distance / speed if speed > 0 else math.inf
