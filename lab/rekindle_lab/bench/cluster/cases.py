"""The cases: nodes and store have faults, one after the other; each leaves a row. Nothing is judged here."""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rekindle_lab.cluster import counter, running
from rekindle_lab.cluster.bed import NODES, Bed, BedError, wait_for
from rekindle_lab.cluster.counter import PATIENCE, Answer
from rekindle_lab.cluster.judge import PERIOD_S, losses

from .faults import KILLS, PASSING, Fault, draw, words
from .output import output
from .plan import Plan
from .rows import Row
from .stage import EVERY_S, GUEST_BYTES, Stage

STEADY = 5
"""Checkpoints in a row before the next fault."""
HELD_EVERY_S = 0.1
HELD_PATIENCE_S = 3.0
"""For an answer that waits for checkpoints."""
HELD_SEED = 10_000
HEARD_S = 1.0
"""So long the client is listened to after the first answer."""
BACK_DEADLINE_S = 120.0
"""For a guest to run again, and for its first answer."""


def _now() -> int:
    return time.time_ns() // 1000


def interval_s(told: list[dict[str, int]]) -> float:
    """The longest of the last checkpoint intervals, and the longest time until one counted, in s."""
    intervals = [event["interval_ms"] / 1e3 for event in told if event.get("interval_ms") is not None]
    return max(intervals, default=0.0) + max(event["commit_us"] / 1e6 for event in told)


def allowed(interval: float) -> int:
    """Ticks that a fail-over may take back: one checkpoint interval, as it came out, and a tick at either end."""
    return int(interval / PERIOD_S) + 2


@dataclass(frozen=True)
class Way:
    """What a case has in common for all of its faults."""

    case: str
    planned: int
    every_s: float = EVERY_S
    output_commit: bool = False
    patience_s: float = PATIENCE
    strict: bool = False
    """Nothing that a client was told may be taken back."""

    def bed(self, stage: Stage) -> Bed:
        """A new one for it."""
        every = f"{round(self.every_s * 1000)}ms"
        return stage.fresh(every, output_commit=self.output_commit, patience_s=self.patience_s)


def told_of(row: Row, before: int, told: list[dict[str, Any]], answers: list[Answer], bound: int) -> None:
    """Put into a row what watch and client have told since `before` (the pid of the QEMU that the guest was in then).

    `bound`: ticks that may be taken back. Where a QEMU's first tick was not seen, nobody knows: that is trouble.
    """
    begun = running.starts(told)
    at = next((index for index, start in enumerate(begun) if start.pid == before), None)
    newer = [] if at is None else begun[at + 1 :]
    lost = [] if at is None else losses(begun[at:], answers)
    drops = list(counter.drops([answer for answer in answers if answer.host_us >= row.at_us - 1_000_000]))
    row.elsewhere = bool(newer)
    row.running_us = min((start.begin_us for start in newer), default=None)
    # Answers of the former guest do not count, which was running until it was fenced.
    since = row.running_us if newer else None if row.kind in KILLS else row.at_us
    heard = (answer.host_us for answer in answers if since is not None and answer.host_us >= since)
    row.answer_us = next(heard, None)
    row.gap_s = max((drop.gap_s for drop in drops), default=0.0)
    row.back_answers = sum(drop.back for drop in drops)
    row.back = max(sum(loss.back or 0 for loss in lost), row.back_answers)
    row.beyond = max(
        sum(max(0, (loss.back or 0) - bound) for loss in lost), sum(max(0, drop.back - bound) for drop in drops)
    )
    if at is None:
        row.trouble += "; the QEMU before was not watched"
    if row.kind in KILLS and not newer:
        row.trouble += "; no other QEMU was seen after the kill"
    if any(loss.back is None for loss in lost):
        row.trouble += "; the first tick of a QEMU was not seen"
    row.trouble = row.trouble.removeprefix("; ")


def _have(bed: Bed, fault: Fault, node: str) -> None:
    """Have the fault; one that passes has passed afterwards."""
    if fault.kind in PASSING:
        begin, end = PASSING[fault.kind]
        bed.call(*words(begin, node))
        time.sleep(fault.lasts_s)
        bed.call(*words(end, node), check=False)
    elif fault.kind == "kill-store-away":
        bed.call("store", "stop")
        time.sleep(fault.lead_s)
        bed.call("kill", node)
        time.sleep(fault.lasts_s)
        bed.call("store", "start")
    else:
        bed.call("kill", node)


def _well(bed: Bed, fault: Fault, before: int, at: int) -> None:
    """Wait until all is well again; raises `BedError` if it is not in time."""
    if fault.kind in KILLS:

        def newer() -> int | None:
            begun = running.starts(bed.told())
            return next((one.begin_us for one in begun if one.pid != before and one.begin_us >= at), None)

        # Next to nothing is asked meanwhile: this is the time that is measured.
        since = wait_for("the guest in another QEMU", newer, BACK_DEADLINE_S)
        answered = lambda: any(one.host_us >= since for one in reversed(bed.answers()[-100:]))  # noqa: E731
        wait_for("its first answer", answered, BACK_DEADLINE_S)
    # A node that was fenced meanwhile is switched on again by this, and joins.
    bed.settle(1)
    heard = len(bed.answers())
    wait_for("the client", lambda: len(bed.answers()) > heard + HEARD_S / 0.02)
    bed.watched()


def _one(stage: Stage, way: Way, row: Row, fault: Fault) -> None:
    """Wait until all is well, have the fault, wait until all is well, tell what was seen meanwhile."""
    bed = stage.bed
    told = bed.settle(STEADY)
    before, home = bed.watched()
    if home != wait_for("the VM to be somewhere", bed.where):
        raise BedError(f"Pacemaker has the VM elsewhere than on {home}, where its QEMU is")
    row.node = next(name for name in NODES if name != home) if fault.kind == "kill-other" else home
    row.spare_bytes = stage.spare_bytes(home)
    time.sleep(fault.wait_s)
    told = (bed.checkpoints() or told)[-STEADY:]
    row.interval_s = interval_s(told)
    row.at_us = _now()
    try:
        _have(bed, fault, row.node)
        _well(bed, fault, before, row.at_us)
        row.recovered = True
    except BedError as error:
        row.trouble = f"; {error}"
    answers, now = bed.answers(), _now()
    # What was not committed while the store was away may be lost, too.
    bound = 0 if way.strict else allowed(row.interval_s + fault.lead_s)
    told_of(row, before, bed.told(), answers, bound)
    row.overlaps = len(running.overlaps([one for one in bed.spans() if one.end_us >= row.at_us]))
    row.fenced_us = bed.fenced_us(row.node, row.at_us)
    if not row.recovered:
        row.gap_s = max(row.gap_s or 0.0, (now - answers[-1].host_us) / 1e6 if answers else 0.0)
    row.recovered = row.recovered and not row.trouble


def _series(stage: Stage, plan: Plan, way: Way, what: str, faults: Iterable[tuple[int, Fault]]) -> None:
    """A row for each fault; after one from which the cluster has not recovered it goes on in a new bed."""
    if _late(stage, plan, what):
        return
    way.bed(stage)
    for number, (seed, fault) in enumerate(faults):
        if number and _late(stage, plan, f"{what} from {number + 1} on"):
            return
        row = Row(way.case, number, fault.kind, seed, "", fault.lasts_s, 0, planned=way.planned, every_s=way.every_s)
        row.guest_bytes = GUEST_BYTES
        try:
            _one(stage, way, row, fault)
        except BedError as error:
            # All was not well any more, though it was after the fault before.
            row.recovered, row.trouble = False, f"before the fault: {error}"
        row.at_us = row.at_us or _now()
        stage.rows.append(row)
        said = f"silence {row.gap_s or 0.0:.2f} s, back {row.back} ({row.beyond} beyond)"
        stage.say(f"{way.case}: {number + 1}: {fault.kind}: {said}{'; ' + row.trouble if row.trouble else ''}")
        if not row.recovered and number + 1 < way.planned:
            with suppress(BedError):
                stage.say("what the bed says: " + "; ".join(words for _, words in stage.bed.events()[-12:]))
            way.bed(stage)


def _late(stage: Stage, plan: Plan, what: str) -> bool:
    late = plan.budget_s is not None and time.monotonic() - stage.began > plan.budget_s
    if late:
        stage.left_out.append(f"{what}: no time left for them")
    return late


def failover(stage: Stage, plan: Plan) -> None:
    """The node with the guest is killed, again and again."""
    given = [(number, killed(number)) for number in range(plan.failovers)]
    _series(stage, plan, Way("failover", plan.failovers), "fail-overs", given)


def faults(stage: Stage, plan: Plan) -> None:
    """Faults at random, from seeds that are told."""
    given = [(number, draw(number)) for number in range(plan.faults)]
    _series(stage, plan, Way("faults", plan.faults), "faults", given)


def killed(number: int) -> Fault:
    """The node with the guest is killed, at another moment of a checkpoint each time."""
    return Fault("kill", 0.0, 0.37 * (number % 7))


def held_faults(count: int) -> list[tuple[int, Fault]]:
    """Every other one is a kill, as in the control: most of those at random leave the guest where it is."""
    seeds = [HELD_SEED + number for number in range(count)]
    return [(seed, draw(seed) if number % 2 else killed(number)) for number, seed in enumerate(seeds)]


def held(stage: Stage, plan: Plan) -> None:
    """The same, what the guest sends being held until a checkpoint counts: nothing seen may be taken back."""
    way = Way("held", plan.held, HELD_EVERY_S, output_commit=True, patience_s=HELD_PATIENCE_S, strict=True)
    _series(stage, plan, way, "faults with output commit", held_faults(plan.held))


def held_off(stage: Stage, plan: Plan) -> None:
    """The control of `held`: nothing is held, and the same judge has to see what is lost."""
    way = Way("held-off", plan.held_off, HELD_EVERY_S, patience_s=HELD_PATIENCE_S, strict=True)
    given = [(number, killed(number)) for number in range(plan.held_off)]
    _series(stage, plan, way, "fail-overs without output commit", given)


CASES: dict[str, Callable[[Stage, Plan], None]] = {
    "failover": failover,
    "faults": faults,
    "held": held,
    "held-off": held_off,
    "output": output,
}
