"""What a client and the QEMUs have told of a run in the test bed, and whether that is as promised.

    python3 -m rekindle_lab.cluster.judge COUNTER RUNNING --every S --kills N

Exit status 1: two guests ran at once, or the counter went back by more than checkpoints allow, or more often than
guests were killed.
Needs nothing but Python itself.
"""

import argparse
import sys
import time
from pathlib import Path

from . import counter, running

PERIOD_S = 0.05
"""Of the guest's ticks, as `cluster/bed` has them."""


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(prog="judge")
    parser.add_argument("counter", type=Path)
    parser.add_argument("running", type=Path)
    parser.add_argument("--every", type=float, required=True, help="from one checkpoint to the next, in seconds")
    parser.add_argument("--kills", type=int, required=True, help="how often a node was killed")
    arguments = parser.parse_args()
    drops = list(counter.drops(counter.read(arguments.counter)))
    spans = running.read(arguments.running, time.time_ns() // 1000)
    wrong = []
    for drop in drops:
        print(
            f"silence of {drop.gap_s:.2f} s; the counter went back by {drop.back} ticks ({drop.back * PERIOD_S:.2f} s)"
        )
    # What was done while the checkpoint was being committed is lost, too: as long again is allowed on a busy machine.
    allowed = 2 * arguments.every / PERIOD_S
    wrong += [f"the counter went back by {drop.back} ticks" for drop in drops if drop.back > allowed]
    if len([drop for drop in drops if drop.back > arguments.every / PERIOD_S / 4]) > arguments.kills:
        wrong.append(f"it went back more often than {arguments.kills} times")
    wrong += [f"two guests ran at once: {one} and {other}" for one, other in running.overlaps(spans)]
    if len({span.pid for span in spans}) < arguments.kills + 1:
        wrong.append(f"only {len(spans)} QEMUs were seen: they were not watched")
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
