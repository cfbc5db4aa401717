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
    all_answers = list(answers)
    losses_by_start = []
    for previous, start in pairwise(starts):
        ticks = [answer.tick for answer in all_answers if previous.begin_us <= answer.host_us < start.begin_us]
        losses_by_start.append(Loss(start, last_seen=max(ticks, default=0)))
    return losses_by_start


def find_faults(
    spans: Sequence[running.Span], losses_of_run: Sequence[Loss], *, checkpoint_every_s: float, kills: int
) -> list[str]:
    """Returns what must not happen in a run with so many killed nodes, as text."""
    faults = [f"the first tick on {loss.start.node} was not seen" for loss in losses_of_run if loss.back is None]
    # A fail-over also loses the ticks during a commit: on a busy machine a commit may take as long as the interval.
    ticks_per_checkpoint = checkpoint_every_s / PERIOD_S
    lost_ticks = [loss.back for loss in losses_of_run if loss.back is not None]
    faults += [f"the counter went back by {ticks} ticks" for ticks in lost_ticks if ticks > 2 * ticks_per_checkpoint]
    if sum(ticks > ticks_per_checkpoint / 4 for ticks in lost_ticks) > kills:
        faults.append(f"it went back more often than {kills} times")
    faults += [f"two guests ran at the same time: {span} and {later}" for span, later in running.overlaps(spans)]
    if len({span.pid for span in spans}) < kills + 1:
        faults.append(f"only {len(spans)} QEMUs were seen: they were not watched")
    return faults


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
    losses_of_run = losses(running.starts(events), answers)
    for drop in counter.drops(answers):
        print(f"no answer for {drop.gap_s:.2f} s")
    for loss in losses_of_run:
        ticks = "unknown ticks" if loss.back is None else f"{loss.back} ticks ({loss.back * PERIOD_S:.2f} s)"
        print(f"{loss.start.node}: it continues {ticks} behind the last answer to a client")
    spans = running.spans(events, time.time_ns() // 1000)
    faults = find_faults(spans, losses_of_run, checkpoint_every_s=arguments.every, kills=arguments.kills)
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
