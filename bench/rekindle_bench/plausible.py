"""Checks in a trial whether a row can be true: its types are the declared ones, its values possible within the run.

Names of a row's fields have the unit as suffix: `*_us` is microseconds, a duration or a time by the host's clock.
"""

import dataclasses
import math
import os
import time
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

SIGNED = ("at", "second")
"""Fields that count from a reboot: negative before the reboot."""
SINCE_1970_US = 10**15
"""Microseconds above this limit are a time by the host's clock; those below are a duration."""
SLACK_US = 2_000_000
"""Error that is allowed in a time, in microseconds: clocks of guests and emulated hosts differ a little."""


def plausible_since(begin_us: int) -> Callable[[Any], list[str]]:
    """Returns a function that lists a row's problems, for a run that began at `begin_us` (microseconds since 1970)."""

    def check(row: Any) -> list[str]:  # noqa: ANN401
        return problems(row, begin_us, time.time_ns() // 1000)

    return check


def problems(row: Any, begin_us: int, now_us: int) -> list[str]:  # noqa: ANN401
    """Returns the problems of a row that was made between `begin_us` and `now_us`."""
    hints = get_type_hints(type(row))
    row_problems, is_measured = [], False
    for field in dataclasses.fields(row):
        value, hint = getattr(row, field.name), hints[field.name]
        if not _has_type(value, hint):
            row_problems.append(f"{field.name} is {value!r}, not {getattr(hint, '__name__', hint)}")
            continue
        # A field without a default identifies the row; the others are measured.
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        is_measured |= has_default and value is not None and value not in ("", [])
        if isinstance(value, int | float) and not isinstance(value, bool):
            row_problems += _problems_of_number(field.name, float(value), begin_us, now_us)
    if not is_measured:
        row_problems.append("nothing in it was measured")
    if trouble := getattr(row, "trouble", ""):
        row_problems.append(str(trouble))
    key = " ".join(str(getattr(row, name)) for name in ("case", "what", "kind", "how") if getattr(row, name, ""))
    return [f"row {key}: {problem}" for problem in row_problems]


def _has_type(value: object, hint: Any) -> bool:  # noqa: ANN401
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_has_type(value, alternative) for alternative in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _problems_of_number(name: str, value: float, begin_us: int, now_us: int) -> list[str]:
    if not math.isfinite(value):
        return [f"{name} is {value}"]
    if value < 0 and name not in SIGNED:
        return [f"{name} is negative: {value:g}"]
    if name == "us" or name.endswith("_us"):
        if value > SINCE_1970_US:
            if not begin_us - SLACK_US <= value <= now_us + SLACK_US:
                return [f"{name} is no time of this run: {value:.0f}"]
        # Processor time, and the summed time of concurrent requests, can exceed the time of the clock.
        elif value > (now_us - begin_us) * max(os.cpu_count() or 1, 2) + SLACK_US:
            return [f"{name} is longer than the run: {value:.0f}"]
    return []
