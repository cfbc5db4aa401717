"""Draws the last fail-over after a node's death as text: from the bed's events, the QEMUs and the client.

    python3 -m rekindle_lab.cluster.timeline BED COUNTER RUNNING

Needs only Python itself.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import counter, judge, running
from .events import BedEvent, read_events

BAR_WIDTH = 60


@dataclass(frozen=True)
class Part:
    """A part of a fail-over with its start and end, in microseconds since 1970."""

    name: str
    begin_us: int
    end_us: int


class FailOver(NamedTuple):
    """A fail-over: the node that was killed, and the parts in the order of their drawing."""

    node: str
    parts: list[Part]


def last_fail_over(events: list[BedEvent], spans: list[running.Span], answers: list[counter.Answer]) -> FailOver:
    """Returns the last fail-over after a kill.

    Raises `ValueError` if there was no kill, or no fail-over after it.
    """
    kill = next((event for event in reversed(events) if event.text.startswith("kill ")), None)
    if kill is None:
        raise ValueError("no node was killed")
    node, killed_us = kill.text.removeprefix("kill "), kill.host_us
    switched_off = f"switch off {node} rc=0"
    fenced_us = next((event.host_us for event in events if event.text == switched_off and event.s >= kill.s), None)
    restored = next((span for span in spans if span.begin_us >= killed_us), None)
    if fenced_us is None or restored is None:
        raise ValueError(f"{node} was not fenced, or its guest does not run again")
    answered_us = next((answer.host_us for answer in answers if answer.host_us >= restored.begin_us), None)
    if answered_us is None:
        raise ValueError("its guest does not answer")
    last_answer_us = max((answer.host_us for answer in answers if answer.host_us <= fenced_us), default=killed_us)
    return FailOver(
        node,
        [
            Part(f"{node} is dead; seen, fenced, confirmed", killed_us, fenced_us),
            Part(f"{restored.node} chosen; restored", fenced_us, restored.begin_us),
            Part("its guest runs; first answer", restored.begin_us, answered_us),
            Part("no answer for the client", last_answer_us, answered_us),
        ],
    )


def draw(parts: list[Part]) -> str:
    """Draws a line for each part."""
    begin_us = min(part.begin_us for part in parts)
    total_us = max(max(part.end_us for part in parts) - begin_us, 1)
    lines = []
    for part in parts:
        indent = (part.begin_us - begin_us) * BAR_WIDTH // total_us
        length = max(1, round((part.end_us - part.begin_us) * BAR_WIDTH / total_us))
        bar = (" " * indent + "█" * length)[:BAR_WIDTH]
        lines.append(f"{part.name:40} {bar:{BAR_WIDTH}} {(part.end_us - part.begin_us) / 1e6:6.2f} s")
    return "\n".join(lines)


def main() -> None:
    """Draws the files named on the command line."""
    bed, counter_file, running_file = map(Path, sys.argv[1:])
    answers = counter.read(counter_file)
    try:
        spans = running.read(running_file, time.time_ns() // 1000)
        fail_over = last_fail_over(read_events(bed), spans, answers)
    except ValueError as error:
        sys.exit(f"timeline: {error}")
    print(draw(fail_over.parts))
    watch_events = map(json.loads, running_file.read_text().splitlines())
    for loss in judge.losses(running.starts(watch_events), answers):
        if loss.back and loss.start.tick is not None:
            print(f"the counter was set back from {loss.last_seen} to {loss.start.tick - 1}: {loss.back} ticks")


if __name__ == "__main__":
    main()
