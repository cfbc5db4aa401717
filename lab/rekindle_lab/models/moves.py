"""Reads techniques that move guests to another host from the JSON of `make bench TOPIC=move`.

A host can be renewed without downtime of its guests if they move to an empty host first. For the models, a way to move
is a technique (`read_moves`), with RootHammer's D_m (downtime of a guest that moves non-live), M_l (duration of a live
migration) and gamma (share of throughput that is lost meanwhile). `MoveRow` has the columns that are read.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypedDict

from rekindle_lab.models.parameters import ParameterError, Parameters, Technique, non_live

TABLE = "By size, load and way (medians; the paper's D_m is `stopped` of non-live, its M_l `whole` of live)"
"""Title of the table of `make bench TOPIC=move` that is read."""


MoveRow = TypedDict(
    "MoveRow",
    {
        "guest": str,  # size of the guest, such as "512M"
        "load": str,  # what runs in it, such as "dirty 20"
        "how": str,  # the way to move: "non-live", "live", "move", ...
        "stopped ms": float,  # guest-stopped time
        "paused before ms": float | None,  # earlier pauses of the guest, all together
        "whole s": float,  # duration of the move
        "degraded": float | None,  # share of throughput lost during the move, to 1; None if it was not measured
        "not converged": int | None,  # live moves that never ended, since the guest wrote faster than they copied
    },
)
"""A row of that table: medians of one way to move one guest under one load."""


class MeasuredMoves(NamedTuple):
    """Techniques that move guests, by name, and the assumptions behind them, as text."""

    techniques: dict[str, Technique]
    notes: tuple[str, ...]


def read_moves(path: Path, guest: str, load: str, vms: int) -> MeasuredMoves:
    """Reads the techniques, with which `vms` guests of a host move one after the other.

    `guest` and `load`: select the rows (`512M`, `dirty 20`). Non-live migration is named `migration`, as in the paper.
    For all other techniques, the guest-stopped time, with earlier pauses, counts as downtime, and each guest is
    degraded while all guests move. Live migrations that did not always converge are omitted.
    """
    if vms < 1:
        raise ParameterError(f"{vms} guests cannot move; give 1 or more")
    try:
        rows: list[MoveRow] = json.loads(path.read_text())["tables"][TABLE]
        measured_cases = list(dict.fromkeys((row["guest"], row["load"]) for row in rows))
        selected = [row for row in rows if (row["guest"], row["load"]) == (guest, load)]
        not_converged = [row["how"] for row in selected if row["not converged"]]
        selected = [row for row in selected if row["how"] not in not_converged]
        techniques = [_technique(row, vms) for row in selected]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path}: not the JSON of `make bench TOPIC=move`: {error!r}") from error
    if not techniques:
        known = ", ".join(f"{size} with load {its_load}" for size, its_load in measured_cases)
        raise ParameterError(f"{path}: no guest '{guest}' with load '{load}'; there are: {known}")
    notes = [f"moves: medians of {guest} with load {load} ({path.name}), {vms} guests one after the other"]
    if any(row["how"] == "non-live" for row in selected):
        notes.append("how much others are disturbed by a non-live migration is not in these results; it is taken as 0")
    if not_converged:
        notes.append(f"left out, since not all of them converged: {', '.join(not_converged)}")
    unknown = [row["how"] for row in selected if row["degraded"] is None and row["how"] != "non-live"]
    if unknown:
        notes.append(f"degradation of {', '.join(unknown)} is not in these results; it is taken as 0")
    return MeasuredMoves({technique.name: technique for technique in techniques}, tuple(notes))


def _technique(row: MoveRow, vms: int) -> Technique:
    stopped_s = (row["stopped ms"] + (row["paused before ms"] or 0.0)) / 1e3
    how = str(row["how"])
    if how == "non-live":
        return non_live(vm_downtime_s=stopped_s, vms=vms, degraded_rate=0.0)
    # If the guest was served faster than before, by chance, there was no degradation.
    degraded_rate = min(1.0, max(0.0, row["degraded"] or 0.0))
    return Technique(
        how, vmm_downtime_s=stopped_s, degraded_rate=degraded_rate, degraded_s=vms * row["whole s"], spare_hosts=1
    )


def with_moves(parameters: Parameters, path: Path, *, guest: str, load: str, vms: int) -> Parameters:
    """Returns the parameters with the measured moves added; these replace techniques of the same name."""
    moves = read_moves(path, guest, load, vms)
    return replace(
        parameters,
        source=f"{parameters.source}; {path.name}, {guest}, {load}",
        techniques={**parameters.techniques, **moves.techniques},
        notes=(*parameters.notes, *moves.notes),
    )
