"""Numbers to reckon with, and those that JSON can hold."""

import math
from collections.abc import Callable
from typing import Any


def finite(value: float) -> bool:
    """Whether it is a number to reckon with; a whole number may be too large to be one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def for_json(value: Any, instead: Callable[[float], Any] = lambda _: None) -> Any:  # noqa: ANN401
    """The same, tables too, with `instead` (`None` if not given) of what is no finite number, which JSON has not."""
    if isinstance(value, dict):
        return {str(key): for_json(one, instead) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(one, instead) for one in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value
