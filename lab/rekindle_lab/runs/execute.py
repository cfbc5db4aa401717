"""Executes one run between its two lines in the ledger, so that a kill at any moment loses no finished run.

The line before the run has its leftovers (key `leaves`): the names of what it makes, such as folders, namespaces and
processes. If the line after the run is missing, a kill has left them; `remove_remains` then removes them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rekindle_lab.runs.ledger import Ledger

Leftovers = dict[str, Any]
"""Names of everything that a run makes, as JSON, so that the remains of a killed run can be removed."""


@dataclass(frozen=True)
class RunEnd:
    """The end of a run: its outcome, and what its line records."""

    outcome: Literal["done", "failed", "left out"]
    entries: dict[str, Any] = field(default_factory=dict)
    """Further entries of the run's line in the ledger."""


def execute(
    ledger: Ledger, run: int | str, leftovers_of: Callable[[int], Leftovers], work: Callable[[Leftovers], RunEnd]
) -> dict[str, Any]:
    """Executes a run by `work`, and returns its line. `leftovers_of` names what an attempt makes, given its number."""
    attempt = ledger.attempts(run) + 1
    names = leftovers_of(attempt)
    began_unix_s, began = round(time.time(), 3), time.monotonic()
    ledger.begin({"run": run, "attempt": attempt, "began_unix_s": began_unix_s, "leaves": names})
    end = work(names)
    line = {
        **end.entries,
        "run": run,
        "attempt": attempt,
        "outcome": end.outcome,
        "began_unix_s": began_unix_s,
        "took_s": round(time.monotonic() - began, 3),
    }
    ledger.end(line)
    return line


def remove_remains(ledger: Ledger, clear: Callable[[Leftovers], None], log: Callable[[str], None]) -> None:
    """Removes the remains of interrupted attempts by `clear`, which may be called again for the same ones."""
    for started in ledger.interrupted():
        clear(started["leaves"])
        ledger.clear(started)
        log(f"run {started['run']}, attempt {started['attempt']}: interrupted; repeated")
