"""The cases of fail-over, listed in `CASES` at the end: faults of nodes and store, one after the other.

`_run_series` runs the faults of a case, `_run_fault` one of them. Each fault appends a row; the analysis judges the
rows. Two cases have *output commit*: a guest's answers wait for the checkpoint after them (see `plan`).
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rekindle_lab.cluster import counter, running
from rekindle_lab.cluster.bed import NODES, Bed, BedError, wait_for
from rekindle_lab.cluster.counter import PATIENCE, Answer
from rekindle_lab.cluster.judge import PERIOD_S, losses

from .beds import EVERY_S, GUEST_BYTES, BedEnvironment
from .faults import KILLS, PASSING, Fault, draw, words
from .output import output
from .plan import Plan
from .rows import Row

STEADY_CHECKPOINTS = 5
"""Number of consecutive checkpoints to wait for before the next fault."""
POLL_S = 0.02
"""Interval in s at which the bed's client asks the guest for its tick."""
SHORT_EVERY_S = 0.1
"""Checkpoint interval of the cases `held` and `held-off`."""
SHORT_PATIENCE_S = 3.0
"""Timeout in s of an answer in these cases, where answers may wait for checkpoints."""
OUTPUT_COMMIT_SEED = 10_000
"""First seed of the random faults of `held`: others than those of `faults`."""
REQUESTS_AFTER_RECOVERY_S = 1.0
"""Seconds for which the client continues to send requests after the first answer."""
BACK_DEADLINE_S = 120.0
"""Deadline in s for a guest to run again, and for the guest's first answer."""


def _now_us() -> int:
    return time.time_ns() // 1000


def interval_s(events: list[dict[str, int]]) -> float:
    """Returns the longest of the latest checkpoint intervals plus the longest commit, in s."""
    intervals = [event["interval_ms"] / 1e3 for event in events if event.get("interval_ms") is not None]
    return max(intervals, default=0.0) + max(event["commit_us"] / 1e6 for event in events)


def allowed_ticks(interval_s: float) -> int:
    """Returns the ticks that a fail-over may lose: one actual checkpoint interval, and a tick at either end."""
    return int(interval_s / PERIOD_S) + 2


@dataclass(frozen=True)
class SeriesSettings:
    """Settings for all faults of a case."""

    case: str
    planned: int
    """Number of faults."""
    every_s: float = EVERY_S
    """Checkpoint interval."""
    output_commit: bool = False
    patience_s: float = PATIENCE
    """Timeout of the client's requests."""
    must_lose_nothing: bool = False
    """Whether no tick that a client has received may be lost. Otherwise `allowed_ticks` may be."""

    def start_bed(self, env: BedEnvironment) -> Bed:
        """Starts a new bed for the case."""
        every = f"{round(self.every_s * 1000)}ms"
        return env.fresh(every, output_commit=self.output_commit, patience_s=self.patience_s)


def record_outcome(row: Row, pid_before: int, events: list[dict[str, Any]], answers: list[Answer], bound: int) -> None:
    """Fills a row from events and answers. `pid_before`: the QEMU that had the guest at the fault.

    `bound`: ticks that may be lost. If a QEMU's first tick was not seen, the loss is unknown: `trouble` reports that.
    """
    starts = running.starts(events)
    index_before = next((index for index, start in enumerate(starts) if start.pid == pid_before), None)
    newer = [] if index_before is None else starts[index_before + 1 :]
    lost = [] if index_before is None else losses(starts[index_before:], answers)
    drops = list(counter.drops([answer for answer in answers if answer.host_us >= row.at_us - 1_000_000]))
    row.elsewhere = bool(newer)
    row.running_us = min((start.begin_us for start in newer), default=None)
    if newer or row.kind not in KILLS:
        # Answers of the previous guest, which ran until it was fenced, do not count.
        since_us = row.running_us if row.running_us is not None else row.at_us
        row.answer_us = next((answer.host_us for answer in answers if answer.host_us >= since_us), None)
    row.gap_s = max((drop.gap_s for drop in drops), default=0.0)
    row.back_answers = sum(drop.back for drop in drops)
    row.back = max(sum(loss.back or 0 for loss in lost), row.back_answers)
    row.beyond = max(
        sum(max(0, (loss.back or 0) - bound) for loss in lost), sum(max(0, drop.back - bound) for drop in drops)
    )
    problems = [row.trouble] if row.trouble else []
    if index_before is None:
        problems.append("the QEMU before was not watched")
    if row.kind in KILLS and not newer:
        problems.append("no other QEMU appeared after the kill")
    if any(loss.back is None for loss in lost):
        problems.append("the first tick of a QEMU was not seen")
    row.trouble = "; ".join(problems)


def _inject(bed: Bed, fault: Fault, node: str) -> None:
    """Injects the fault; ends it again if it is temporary."""
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


def _wait_for_fail_over(bed: Bed, pid_before: int, fault_us: int) -> None:
    """Waits until the guest runs in another QEMU and has answered; raises `BedError` at the deadline."""

    def newer_begin_us() -> int | None:
        for start in running.starts(bed.watch_events()):
            if start.pid != pid_before and start.begin_us >= fault_us:
                return start.begin_us
        return None

    # Polls rarely, since the time of the fail-over is what is measured.
    running_us = wait_for("the guest in another QEMU", newer_begin_us, BACK_DEADLINE_S)

    def is_answered() -> bool:
        return any(answer.host_us >= running_us for answer in bed.answers()[-100:])

    wait_for("its first answer", is_answered, BACK_DEADLINE_S)


def _wait_recovered(bed: Bed, fault: Fault, pid_before: int, fault_us: int) -> None:
    """Waits until the cluster has recovered; raises `BedError` at the deadline."""
    if fault.kind in KILLS:
        _wait_for_fail_over(bed, pid_before, fault_us)
    # Also switches on a node that was fenced meanwhile, so that it joins.
    bed.settle(1)
    answers = len(bed.answers())
    wait_for("the client", lambda: len(bed.answers()) > answers + REQUESTS_AFTER_RECOVERY_S / POLL_S)
    bed.watched()


def _run_fault(env: BedEnvironment, settings: SeriesSettings, row: Row, fault: Fault) -> None:
    """Waits until the cluster is healthy, injects the fault, waits for recovery, and records the outcome."""
    bed = env.bed
    events = bed.settle(STEADY_CHECKPOINTS)
    pid_before, home = bed.watched()
    if home != wait_for("Pacemaker to run the VM", bed.vm_node):
        raise BedError(f"Pacemaker has the VM elsewhere than on {home}, where its QEMU is")
    row.node = next(name for name in NODES if name != home) if fault.kind == "kill-other" else home
    row.spare_bytes = env.spare_bytes(home)
    time.sleep(fault.wait_s)
    events = (bed.checkpoints() or events)[-STEADY_CHECKPOINTS:]
    row.interval_s = interval_s(events)
    row.at_us = _now_us()
    try:
        _inject(bed, fault, row.node)
        _wait_recovered(bed, fault, pid_before, row.at_us)
        row.recovered = True
    except BedError as error:
        row.trouble = str(error)
    answers, now_us = bed.answers(), _now_us()
    # Writes that could not be committed while the store was unavailable may be lost, too.
    bound = 0 if settings.must_lose_nothing else allowed_ticks(row.interval_s + fault.lead_s)
    record_outcome(row, pid_before, bed.watch_events(), answers, bound)
    row.overlaps = len(running.overlaps([span for span in bed.spans() if span.end_us >= row.at_us]))
    row.fenced_us = bed.fenced_us(row.node, row.at_us)
    if not row.recovered:
        row.gap_s = max(row.gap_s or 0.0, (now_us - answers[-1].host_us) / 1e6 if answers else 0.0)
    row.recovered = row.recovered and not row.trouble


def _run_series(
    env: BedEnvironment, plan: Plan, settings: SeriesSettings, what: str, faults: Iterable[tuple[int, Fault]]
) -> None:
    """Appends a row for each fault (with its seed); starts a new bed after one from which the cluster does not recover.

    `what`: the faults in reports, such as `fail-overs`.
    """
    if _is_late(env, plan, what):
        return
    settings.start_bed(env)
    for number, (seed, fault) in enumerate(faults):
        if number and _is_late(env, plan, f"{what} from {number + 1} on"):
            return
        row = _new_row(settings, number, seed, fault)
        try:
            _run_fault(env, settings, row, fault)
        except BedError as error:
            # The cluster was healthy after the previous fault, but no longer is.
            row.recovered, row.trouble = False, f"before the fault: {error}"
        row.at_us = row.at_us or _now_us()
        env.rows.append(row)
        _log_outcome(env, row)
        if not row.recovered and number + 1 < settings.planned:
            with suppress(BedError):
                env.log("last events of the bed: " + "; ".join(words for _, words in env.bed.events()[-12:]))
            settings.start_bed(env)


def _new_row(settings: SeriesSettings, number: int, seed: int, fault: Fault) -> Row:
    """Returns a row without the node, the time and the outcome of the fault."""
    return Row(
        case=settings.case,
        round=number,
        kind=fault.kind,
        seed=seed,
        node="",
        lasted_s=fault.lasts_s,
        at_us=0,
        planned=settings.planned,
        every_s=settings.every_s,
        guest_bytes=GUEST_BYTES,
    )


def _log_outcome(env: BedEnvironment, row: Row) -> None:
    outcome = f"silence {row.gap_s or 0.0:.2f} s, back {row.back} ({row.beyond} beyond)"
    trouble = f"; {row.trouble}" if row.trouble else ""
    env.log(f"{row.case}: {row.round + 1}: {row.kind}: {outcome}{trouble}")


def _is_late(env: BedEnvironment, plan: Plan, what: str) -> bool:
    """Returns whether the plan's time is over; then records that `what` is left out."""
    late = plan.budget_s is not None and time.monotonic() - env.began > plan.budget_s
    if late:
        env.left_out.append(f"{what}: no time left for them")
    return late


def failover(env: BedEnvironment, plan: Plan) -> None:
    """Kills the node with the guest, repeatedly."""
    settings = SeriesSettings("failover", planned=plan.failovers)
    _run_series(env, plan, settings, "fail-overs", kills(plan.failovers))


def faults(env: BedEnvironment, plan: Plan) -> None:
    """Injects random faults; their seeds are recorded."""
    drawn = [(seed, draw(seed)) for seed in range(plan.random_faults)]
    _run_series(env, plan, SeriesSettings("faults", planned=plan.random_faults), "faults", drawn)


def kill(number: int) -> Fault:
    """Returns a kill of the guest's node; each number hits another moment of a checkpoint."""
    return Fault("kill", lasts_s=0.0, wait_s=0.37 * (number % 7))


def kills(count: int) -> list[tuple[int, Fault]]:
    """Returns kills of the guest's node, with their numbers."""
    return [(number, kill(number)) for number in range(count)]


def output_commit_faults(count: int) -> list[tuple[int, Fault]]:
    """Returns faults with their seeds. Every other one is a kill, since most random faults do not move the guest."""
    seeds = [OUTPUT_COMMIT_SEED + number for number in range(count)]
    return [(seed, draw(seed) if number % 2 else kill(number)) for number, seed in enumerate(seeds)]


def with_output_commit(env: BedEnvironment, plan: Plan) -> None:
    """Injects faults with output commit: nothing that a client has received may be lost."""
    settings = SeriesSettings(
        "held",
        planned=plan.output_commit_faults,
        every_s=SHORT_EVERY_S,
        output_commit=True,
        patience_s=SHORT_PATIENCE_S,
        must_lose_nothing=True,
    )
    faults_of_case = output_commit_faults(plan.output_commit_faults)
    _run_series(env, plan, settings, "faults with output commit", faults_of_case)


def control_without_output_commit(env: BedEnvironment, plan: Plan) -> None:
    """Kills as in `held`, but without output commit: the check of `held` must detect the lost ticks."""
    settings = SeriesSettings(
        "held-off",
        planned=plan.control_kills,
        every_s=SHORT_EVERY_S,
        patience_s=SHORT_PATIENCE_S,
        must_lose_nothing=True,
    )
    _run_series(env, plan, settings, "fail-overs without output commit", kills(plan.control_kills))


CASES: dict[str, Callable[[BedEnvironment, Plan], None]] = {
    "failover": failover,
    "faults": faults,
    "held": with_output_commit,
    "held-off": control_without_output_commit,
    "output": output,
}
