"""The parts of a benchmark's cases: plan, trial, and the reasons to omit a case."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Case = Callable[[Any, Any], None]
"""Measures in an environment (first argument) by a plan, and appends rows."""


class NoRoomError(Exception):
    """The machine has not enough memory or disk for a case, or a requirement is missing."""


class NotPlannedError(Exception):
    """A plan does not include a case."""


class Plan(Protocol):
    """The part of a plan that every topic has."""

    @property
    def budget_s(self) -> float | None:
        """Seconds after the start of the run after which no case begins; `None`: no limit."""


@dataclass(frozen=True)
class Trial:
    """A run that only checks that every case still works."""

    not_tried: Mapping[str, str]
    """Cases that a trial leaves out, each with the reason."""
