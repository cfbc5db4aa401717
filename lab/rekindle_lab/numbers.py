"""Checks for finite numbers, and replaces numbers that JSON cannot represent."""

import math
from collections.abc import Callable
from typing import Any


def finite(value: float) -> bool:
    """Returns whether `value` is a finite number. A whole number may be too large for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def for_json(value: Any, instead: Callable[[float], Any] = lambda _: None) -> Any:  # noqa: ANN401
    """Returns the value, tables too, with `instead` (default `None`) in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {str(key): for_json(item, instead) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(item, instead) for item in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value
