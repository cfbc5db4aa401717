"""The command `rekindle-lab aging`: `trend` judges samples of real hosts, `quiet` measures false alarms."""

import json
import math
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle_lab.aging import exhaustion
from rekindle_lab.aging.exhaustion import DAY_S, Finding
from rekindle_lab.aging.quiet import KINDS, false_alarms
from rekindle_lab.aging.samples import METRICS, SamplesError, read
from rekindle_lab.failure import fail
from rekindle_lab.numbers import for_json, is_finite_number
from rekindle_lab.tables import table

app = typer.Typer(no_args_is_help=True, help="Find resources that run out on a host and its guests.")


def _parse_limits(options: list[str] | None) -> dict[str, float]:
    """Parses `--limit METRIC=VALUE`. Raises `typer.Exit` for an invalid one."""
    limits = {}
    for option in options or []:
        metric, _, text = option.partition("=")
        if not metric or not text:
            raise fail("aging", f"--limit {option}: it must be NAME=VALUE")
        if metric not in METRICS:
            raise fail("aging", f"--limit: no metric '{metric}'; there are: {', '.join(METRICS)}")
        try:
            limits[metric] = float(text)
        except ValueError as error:
            raise fail("aging", f"--limit {metric}={text}: not a number") from error
        if not is_finite_number(limits[metric]):
            raise fail("aging", f"--limit {metric}={text}: not a finite number")
    return limits


def format_time_left(seconds: float | None) -> str:
    """Formats a time to exhaustion for the terminal."""
    if seconds is None:
        return ""
    return "never" if math.isinf(seconds) else f"{seconds / DAY_S:.3g} d"


def row(finding: Finding) -> dict[str, Any]:
    """Returns a finding as a row of the table."""
    per_day = ""
    if finding.trend is not None:
        slope, low, high = finding.trend.slope, finding.trend.slope_low, finding.trend.slope_high
        per_day = f"{slope * DAY_S:+.4g} ({low * DAY_S:+.4g} to {high * DAY_S:+.4g})"
    interval = ""
    if finding.left_low_s is not None:
        interval = f"{format_time_left(finding.left_low_s)} to {format_time_left(finding.left_high_s)}"
    return {
        "what": finding.series.name,
        "hours": round(finding.series.hours, 1),
        "samples": finding.series.values.size,
        "of earlier boots": finding.series.before or "",
        "a day": per_day,
        "P-value": f"{finding.p:.3g}" if finding.trend else "",
        "left": format_time_left(finding.left_s),
        "95 %": interval,
        "": "ALARM" if finding.alarm else finding.why,
    }


def as_json(finding: Finding) -> dict[str, Any]:
    """Returns a finding as JSON; a time that is infinite or unknown is `null`."""
    trend = finding.trend
    return for_json(
        {
            "host": finding.series.host,
            "guest": finding.series.guest,
            "metric": finding.series.metric,
            "limit": finding.series.limit,
            "hours": finding.series.hours,
            "samples": int(finding.series.values.size),
            "samples_of_earlier_boots": finding.series.before,
            "p": finding.p,
            "slope_per_s": trend.slope if trend else None,
            "slope_ci95_per_s": [trend.slope_low, trend.slope_high] if trend else None,
            "autocorrelation_inflation": trend.inflation if trend else None,
            "left_s": finding.left_s,
            "left_ci95_s": [finding.left_low_s, finding.left_high_s],
            "alarm": finding.alarm,
            "why": finding.why,
        }
    )


@app.command("trend")
def trend(
    samples: Annotated[Path, typer.Argument(help="JSON lines as written by `rekindle monitor`.")],
    limit: Annotated[list[str] | None, typer.Option(help="METRIC=VALUE: limit of a metric, in its unit.")] = None,
    alpha: Annotated[float, typer.Option(help="Significance level, for all series of a host.")] = exhaustion.ALPHA,
    horizon_d: Annotated[float, typer.Option(help="Alarm if exhausted within this many days.")] = exhaustion.HORIZON_D,
    json_out: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show trends and the time until a resource is used up. Samples before the last boot are counted and ignored.

    Exit status 0: no alarm; 1: at least one; 2: wrong input.
    """
    if not 0 < alpha < 1:
        raise fail("aging", f"--alpha {alpha:g}: it must be between 0 and 1")
    if not 0 < horizon_d < math.inf:
        raise fail("aging", f"--horizon-d {horizon_d:g}: it must be days, more than 0")
    try:
        all_series = read(samples, _parse_limits(limit))
    except SamplesError as error:
        raise fail("aging", error) from error
    by_host = defaultdict(list)
    for series in all_series:
        by_host[series.host].append(series)
    findings = [finding for host in by_host.values() for finding in exhaustion.judge(host, alpha, horizon_d)]
    if json_out:
        print(json.dumps({"findings": [as_json(finding) for finding in findings]}))
    else:
        print(table([row(finding) for finding in findings], "Trends (per day, with 95 % intervals)"))
    raise typer.Exit(1 if any(finding.alarm for finding in findings) else 0)


@app.command("quiet")
def quiet(
    host_weeks: Annotated[int, typer.Option(min=1, help="Simulated hosts of each kind, one week each.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the simulated traces.")] = 1,
    json_out: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure false alarms per host and week on simulated traces without aging."""
    rates = [asdict(false_alarms(kind, host_weeks, seed=seed)) for kind in KINDS]
    if json_out:
        print(json.dumps(rates))
    else:
        rows = [{**rate, "high": f"{rate['high']:.3g}"} for rate in rates]
        print(table(rows, "False alarms per host-week (high: upper end of the 95 % interval)"))
