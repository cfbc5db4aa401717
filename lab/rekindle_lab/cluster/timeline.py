"""Draws the last fail-over after a node's death as text: from the bed's events, the QEMUs and the client.

    python3 -m rekindle_lab.cluster.timeline BED COUNTER RUNNING

Needs only Python itself.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from . import counter, judge, running

WIDTH = 60


@dataclass(frozen=True)
class Part:
    """A part of a fail-over with its start and end, in microseconds since 1970."""

    name: str
    begin_us: int
    end_us: int


def parts(
    events: list[tuple[float, str]], spans: list[running.Span], answers: list[counter.Answer]
) -> tuple[str, list[Part]]:
    """Returns the parts of the last fail-over after a kill.

    Raises `ValueError` if there was no kill, or no fail-over after it.
    """
    kills = [(round(at * 1e6), words.removeprefix("kill ")) for at, words in events if words.startswith("kill ")]
    if not kills:
        raise ValueError("no node was killed")
    killed_us, node = kills[-1]
    done = f"switch off {node} rc=0"
    fenced = [round(at * 1e6) for at, words in events if words == done and at * 1e6 >= killed_us]
    began = [span for span in spans if span.begin_us >= killed_us]
    if not fenced or not began:
        raise ValueError(f"{node} was not fenced, or its guest does not run again")
    after = [answer for answer in answers if answer.host_us >= began[0].begin_us]
    if not after:
        raise ValueError("its guest does not answer")
    before = [answer.host_us for answer in answers if answer.host_us <= fenced[0]]
    return node, [
        Part(f"{node} is dead; seen, fenced, confirmed", killed_us, fenced[0]),
        Part(f"{began[0].node} chosen; restored", fenced[0], began[0].begin_us),
        Part("its guest runs; first answer", began[0].begin_us, after[0].host_us),
        Part("no answer for the client", max(before, default=killed_us), after[0].host_us),
    ]


def draw(found: list[Part]) -> str:
    """Draws a line for each part."""
    begin = min(part.begin_us for part in found)
    whole = max(max(part.end_us for part in found) - begin, 1)
    lines = []
    for part in found:
        at = (part.begin_us - begin) * WIDTH // whole
        long = max(1, round((part.end_us - part.begin_us) * WIDTH / whole))
        bar = (" " * at + "█" * long)[:WIDTH]
        lines.append(f"{part.name:40} {bar:{WIDTH}} {(part.end_us - part.begin_us) / 1e6:6.2f} s")
    return "\n".join(lines)


def main() -> None:
    """Draws the files named on the command line."""
    bed, counted, ran = map(Path, sys.argv[1:])
    lines = (bed / "shared" / "events").read_text().splitlines()
    events = [(float(at), words) for at, words in (line.split(" ", 1) for line in lines)]
    answers = counter.read(counted)
    try:
        _, found = parts(events, running.read(ran, time.time_ns() // 1000), answers)
    except ValueError as error:
        sys.exit(f"timeline: {error}")
    print(draw(found))
    watched = map(json.loads, ran.read_text().splitlines())
    for loss in judge.losses(running.starts(watched), answers):
        if loss.back and loss.start.tick is not None:
            print(f"the counter was set back from {loss.last_seen} to {loss.start.tick - 1}: {loss.back} ticks")


if __name__ == "__main__":
    main()
