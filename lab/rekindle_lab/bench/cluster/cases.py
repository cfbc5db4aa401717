"""The cases: nodes and store have faults, one after the other; each leaves a row. Nothing is judged here."""

import time
from collections.abc import Callable

from rekindle_lab.cluster import counter, running
from rekindle_lab.cluster.bed import NODES, VM, wait_for
from rekindle_lab.cluster.judge import PERIOD_S

from .faults import PASSING, Fault, draw, words
from .plan import Plan
from .rows import Row
from .stage import GUEST_BYTES, Stage

STEADY = 5
"""Checkpoints in a row before the next fault."""
HELD_EVERY = "100ms"
HELD_PATIENCE_S = 3.0
"""For an answer that waits for checkpoints."""
HELD_SEED = 10_000
HEARD_S = 1.0
"""So long the client is listened to after the first answer."""


def _now() -> int:
    return time.time_ns() // 1000


def interval_s(told: list[dict[str, int]]) -> float:
    """The longest of the last checkpoint intervals, and the longest time until one counted, in s."""
    intervals = [event["interval_ms"] / 1e3 for event in told if event.get("interval_ms") is not None]
    return max(intervals, default=0.0) + max(event["commit_us"] / 1e6 for event in told)


def allowed(interval: float) -> int:
    """Ticks that a fail-over may take back: one checkpoint interval, as it came out, and a tick at either end."""
    return int(interval / PERIOD_S) + 2


def _one(stage: Stage, case: str, number: int, fault: Fault, seed: int, *, held: bool = False) -> None:
    """Wait until all is well, have the fault, wait until all is well, tell what was seen meanwhile."""
    bed = stage.bed
    told = bed.settle(STEADY)
    home = wait_for("the VM to be somewhere", bed.where)
    node = next(name for name in NODES if name != home) if fault.kind == "kill-other" else home
    spare = stage.spare_bytes(home)
    time.sleep(fault.wait_s)
    told = (bed.checkpoints() or told)[-STEADY:]
    begun = len(bed.answers())
    before = {span.pid for span in bed.spans() if span.end_us >= _now() - 1_000_000}
    at = _now()
    if fault.kind in PASSING:
        begin, end = PASSING[fault.kind]
        bed.call(*words(begin, node))
        time.sleep(fault.lasts_s)
        bed.call(*words(end, node), check=False)
    else:
        bed.call("kill", node)

    # A node that was fenced meanwhile is switched on again by this, and joins.
    bed.settle(1)
    heard = len(bed.answers())
    wait_for("the client", lambda: len(bed.answers()) > heard + HEARD_S / 0.02)
    answers, spans = bed.answers()[max(0, begun - 1) :], bed.spans()
    newer = [span for span in spans if span.pid not in before and span.begin_us >= at]
    drops = list(counter.drops(answers))
    interval = interval_s(told)
    row = Row(case, number, fault.kind, seed, node, fault.lasts_s, at)
    row.elsewhere = bool(newer)
    row.fenced_us = bed.fenced_us(node, at)
    row.running_us = min((span.begin_us for span in newer), default=None)
    # Answers of the former guest do not count, which was running until it was fenced.
    since = row.running_us or at
    row.answer_us = next((answer.host_us for answer in answers if answer.host_us >= since), None)
    row.gap_s = max((drop.gap_s for drop in drops), default=0.0)
    row.back = sum(drop.back for drop in drops)
    row.beyond = sum(max(0, drop.back - (0 if held else allowed(interval))) for drop in drops)
    row.overlaps = len(running.overlaps([span for span in spans if span.end_us >= at]))
    row.interval_s, row.spare_bytes, row.guest_bytes = interval, spare, GUEST_BYTES
    stage.rows.append(row)
    stage.say(f"{case}: {number + 1}: {fault.kind}: silence {row.gap_s:.2f} s, back {row.back} ({row.beyond} beyond)")


def _late(stage: Stage, plan: Plan, what: str) -> bool:
    late = plan.budget_s is not None and time.monotonic() - stage.began > plan.budget_s
    if late:
        stage.left_out.append(f"{what}: no time left for them")
    return late


def failover(stage: Stage, plan: Plan) -> None:
    """The node with the guest is killed, again and again."""
    for number in range(plan.failovers):
        if _late(stage, plan, f"fail-overs from {number + 1} on"):
            return
        _one(stage, "failover", number, Fault("kill", 0.0, 0.37 * (number % 7)), number)


def faults(stage: Stage, plan: Plan) -> None:
    """Faults at random, from seeds that are told."""
    for number in range(plan.faults):
        if _late(stage, plan, f"faults from {number + 1} on"):
            return
        _one(stage, "faults", number, draw(number), number)


def held(stage: Stage, plan: Plan) -> None:
    """The same, what the guest sends being held until a checkpoint counts: nothing seen may be taken back."""
    if _late(stage, plan, "faults with output commit"):
        return
    for key, value in (("every", HELD_EVERY), ("output_commit", "true")):
        stage.bed.call("set", VM, key, value)
    stage.bed.listen(HELD_PATIENCE_S)
    for number in range(plan.held):
        if _late(stage, plan, f"faults with output commit from {number + 1} on"):
            return
        seed = HELD_SEED + number
        _one(stage, "held", number, draw(seed), seed, held=True)


CASES: dict[str, Callable[[Stage, Plan], None]] = {"failover": failover, "faults": faults, "held": held}
