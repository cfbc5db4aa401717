"""From raw rows to figures. Reads nothing but the rows, so that a file can be analysed again."""

import pandas as pd

from rekindle_lab.bench.report import Bar, Figure, Found
from rekindle_lab.bench.rows import pick
from rekindle_lab.stats import median, p95

BARS = {
    "failover_s": Bar(4.0),
    "failover_restore_s": Bar(0.5),
    "split_brain": Bar(0.0, "=="),
    "counter_back": Bar(0.0, "=="),
    "counter_back_held": Bar(0.0, "=="),
    "spare_memory": Bar(0.01),
}


def figures(frame: pd.DataFrame, raw: str) -> Found:
    """The figures of the issue's table. `raw`: the rows' file."""
    found = Found(raw)
    kills = frame[(frame["case"] == "failover") & frame["answer_us"].notna() & frame["fenced_us"].notna()]
    samples = {
        "failover_s": (kills["answer_us"] - kills["at_us"]) / 1e6,
        "failover_restore_s": (kills["answer_us"] - kills["fenced_us"]) / 1e6,
    }
    for name, values in samples.items():
        _add(found, name, "s", [float(value) for value in values])
    # What came of all of them together; those that were killed for the time count too.
    several = frame if len(frame[frame["case"] == "faults"]) else frame.iloc[:0]
    free, held = several[several["case"] != "held"], frame[frame["case"] == "held"]
    for name, rows, column in (
        ("split_brain", several, "overlaps"),
        ("counter_back", free, "beyond"),
        ("counter_back_held", held, "beyond"),
    ):
        _add(found, name, "", pick(rows, column) if len(rows) else [], together=True)
    spare = frame[frame["spare_bytes"].notna()]
    _add(found, "spare_memory", "", [float(value) for value in spare["spare_bytes"] / spare["guest_bytes"]])
    return found


def _add(found: Found, name: str, unit: str, values: list[float], *, together: bool = False) -> None:
    if not values:
        found.lacks(name)
        return
    value = sum(values) if together else median(values)
    found.add(Figure(name, value, unit, len(values), p95(values), BARS[name], found.raw))


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each fail-over whose node was killed: until it was fenced, until the guest ran, until it answered, in s."""
    kills = frame[(frame["case"] == "failover") & frame["answer_us"].notna() & frame["fenced_us"].notna()]
    return pd.DataFrame(
        {
            "seen and fenced": (kills["fenced_us"] - kills["at_us"]) / 1e6,
            "decided, restored": (kills["running_us"] - kills["fenced_us"]) / 1e6,
            "first answer": (kills["answer_us"] - kills["running_us"]) / 1e6,
        }
    )


def summary(frame: pd.DataFrame) -> list[dict[str, object]]:
    """The parts of a fail-over."""
    return [
        {"part": name, "n": int(column.count()), "median s": median(list(column)), "p95": p95(list(column))}
        for name, column in parts(frame).items()
        if column.count()
    ]


def by_kind(frame: pd.DataFrame) -> list[dict[str, object]]:
    """What came of each kind of fault."""
    lines: list[dict[str, object]] = []
    for (case, kind), group in frame.groupby(["case", "kind"], sort=True):
        lines.append(
            {
                "case": case,
                "fault": kind,
                "n": len(group),
                "failed over": int(group["elsewhere"].sum()),
                "longest silence s": float(group["gap_s"].max()),
                "most ticks back": int(group["back"].max()),
                "beyond an interval": int(group["beyond"].sum()),
                "two at once": int(group["overlaps"].sum()),
            }
        )
    return lines
