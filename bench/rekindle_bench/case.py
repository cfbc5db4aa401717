"""What the cases of a benchmark are made of: a plan, a trial, and reasons why a case is omitted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Case = Callable[[Any, Any], None]
"""Measures on a env by a plan, and appends rows."""


class NoRoomError(Exception):
    """The machine has not enough memory or disk for a case, or a requirement is missing."""


class NotPlannedError(Exception):
    """A plan does not include a case."""


class Plan(Protocol):
    """The common part of the topics' plans."""

    @property
    def budget_s(self) -> float | None:
        """A case that would begin later than this is left out."""


@dataclass(frozen=True)
class Trial:
    """A run that only checks that every case still works."""

    not_tried: Mapping[str, str]
    """Cases that are left out, with reasons."""
