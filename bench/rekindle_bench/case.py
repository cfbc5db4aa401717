"""What the runner of cases knows of a case: its signature, its plan, and the reasons to omit it.

A *case* is a function of a topic that measures one thing. A *plan* has the repetitions and sizes of a topic's cases. A
*trial* is a run that only checks that every case still works.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Case = Callable[[Any, Any], None]
"""Measures in an environment (first argument) by a plan, and appends rows."""


class NoRoomError(Exception):
    """The machine has not enough memory or disk for a case, or a requirement is missing.

    The text continues a sentence that begins with `the machine`, such as `has no loop devices`.
    """


class NotPlannedError(Exception):
    """A plan does not include a case."""


class Plan(Protocol):
    """The part of a plan that every topic has."""

    @property
    def budget_s(self) -> float | None:
        """Seconds after the start of the run after which no case begins; `None`: no limit."""


@dataclass(frozen=True)
class Trial:
    """The settings of a trial; `trial.py` has the plans."""

    not_tried: Mapping[str, str]
    """Cases that a trial leaves out, each with the reason."""
