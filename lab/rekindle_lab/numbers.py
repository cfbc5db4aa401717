"""Checks for finite numbers, and replaces numbers that JSON cannot represent."""

import math
from collections.abc import Callable
from typing import Any, TypeGuard


def is_finite_number(value: object) -> TypeGuard[float]:
    """Returns whether `value`, as read from JSON or TOML, is a number that a float can represent; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is too large for a float
        return False


def for_json(value: Any, instead: Callable[[float], Any] = lambda _: None) -> Any:  # noqa: ANN401
    """Returns the value, tables too, with `instead` (default `None`) in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {str(key): for_json(item, instead) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(item, instead) for item in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value
