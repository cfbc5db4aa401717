"""Judges a run in the test bed from the records of its client and of the QEMUs.

    python3 -m rekindle_lab.cluster.judge COUNTER RUNNING --every S --kills N

Exit status 1: two guests ran at the same time, or the counter was set back by more than checkpoints allow, or more
often than nodes were killed.

A loss is computed from the first tick of the guest in its new QEMU. By its first answer the guest has counted further,
which would hide part of the loss.
Needs only Python itself.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from . import counter, running

PERIOD_S = 0.05
"""Seconds between two ticks of the guest: the default of `tests/cluster/bed`."""


@dataclass(frozen=True)
class Loss:
    """The ticks that a guest has lost when it continues in another QEMU."""

    start: running.GuestStart
    last_seen: int
    """The highest tick that a client has received from the previous QEMU."""

    @property
    def back(self) -> int | None:
        """Ticks that a client has received and that are lost; `None` if the guest's first tick was not seen."""
        if self.start.tick is None:
            return None
        # The counter was one less before the first tick.
        return max(0, self.last_seen - (self.start.tick - 1))


def losses(starts: Sequence[running.GuestStart], answers: Iterable[counter.Answer]) -> list[Loss]:
    """Returns a loss for each QEMU but the first; `starts` in their order.

    >>> first, second = running.GuestStart(1, "a", 0, 1), running.GuestStart(2, "b", 900_000, 4)
    >>> answers = [counter.Answer(0, 5), counter.Answer(100_000, 6), counter.Answer(1_500_000, 12)]
    >>> [loss.back for loss in losses([first, second], answers)]
    [3]
    """
    known = list(answers)
    found = []
    for before, start in pairwise(starts):
        seen = [answer.tick for answer in known if before.begin_us <= answer.host_us < start.begin_us]
        found.append(Loss(start, max(seen, default=0)))
    return found


def main() -> None:
    """Judges the files named on the command line."""
    parser = argparse.ArgumentParser(prog="judge")
    parser.add_argument("counter", type=Path)
    parser.add_argument("running", type=Path)
    parser.add_argument("--every", type=float, required=True, help="checkpoint interval in seconds")
    parser.add_argument("--kills", type=int, required=True, help="number of nodes killed")
    arguments = parser.parse_args()
    answers = counter.read(arguments.counter)
    events = [json.loads(line) for line in arguments.running.read_text().splitlines()]
    spans = running.spans(events, time.time_ns() // 1000)
    lost = losses(running.starts(events), answers)
    wrong = []
    for drop in counter.drops(answers):
        print(f"no answer for {drop.gap_s:.2f} s")
    for loss in lost:
        ticks = "unknown ticks" if loss.back is None else f"{loss.back} ticks ({loss.back * PERIOD_S:.2f} s)"
        print(f"{loss.start.node}: it continues {ticks} behind the last answer to a client")
    wrong += [f"the first tick on {loss.start.node} was not seen" for loss in lost if loss.back is None]
    # A fail-over also loses the ticks during a commit: on a busy machine a commit may take as long as the interval.
    allowed = 2 * arguments.every / PERIOD_S
    backs = [loss.back for loss in lost if loss.back is not None]
    wrong += [f"the counter went back by {back} ticks" for back in backs if back > allowed]
    if len([back for back in backs if back > arguments.every / PERIOD_S / 4]) > arguments.kills:
        wrong.append(f"it went back more often than {arguments.kills} times")
    wrong += [f"two guests ran at the same time: {one} and {other}" for one, other in running.overlaps(spans)]
    if len({span.pid for span in spans}) < arguments.kills + 1:
        wrong.append(f"only {len(spans)} QEMUs were seen: they were not watched")
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
