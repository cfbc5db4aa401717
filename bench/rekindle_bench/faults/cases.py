"""The only case: faults, a warm-cache reboot, and a comparison of every block. The analysis judges the rows.

`faults` runs `one_run` for every type of fault, in *lanes* (threads), each with guests of its own (*subjects*).
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from rekindle_lab.rekindle import RekindleError

from .damaged_guests import FaultEnvironment, NoAnswerError, Subject, complaints
from .kinds import BY_NAME, Kind
from .plan import BLOCKS, Plan
from .ram import Ram
from .rows import Row

PATIENCE_S = 4.0
"""Seconds without an answer, or without progress of its load, after which a guest counts as hung."""
REBOOT_S = 60.0
"""Deadline for a crashed guest to be booted again."""
LOADED = 50
"""Blocks read, blocks written and packets sent after which the guest's load counts as running."""
TRIES = 5
"""Number of other changes to try when the module rejects a change of code that the kernel itself has changed."""
LISTED = 10
"""Number of wrong blocks that a row names."""


class Job(NamedTuple):
    """One run that remains to be done."""

    block: int
    """Number of the set of runs that has each type once."""
    kind: str
    checked: int
    """1 if digests are checked, else 0."""

    @property
    def label(self) -> str:
        """The type of faults, and whether digests are unchecked, for messages."""
        return self.kind if self.checked else f"{self.kind}, unchecked"


def jobs(plan: Plan, finished: dict[tuple[str, int], int]) -> list[Job]:
    """Returns the remaining runs. `finished`: number of finished runs, by type and by whether digests were checked.

    A block has each type once, in a new order: an interrupted experiment has almost equally many runs of each type.
    """
    unchecked_every = max(plan.runs // plan.unchecked, 1) if plan.unchecked else 0
    jobs_left = []
    for block in range(plan.runs):
        names = list(plan.kinds)
        random.Random(block).shuffle(names)
        jobs_left += [Job(block, name, 1) for name in names if block >= finished.get((name, 1), 0)]
        if unchecked_every and block % unchecked_every == 0 and block // unchecked_every < plan.unchecked:
            jobs_left += [
                Job(block, name, 0) for name in names if block // unchecked_every >= finished.get((name, 0), 0)
            ]
    return jobs_left


class Lane:
    """Runs one job after the other, in a guest for each kind of disk server. The first job with it boots the guest."""

    def __init__(self, env: FaultEnvironment, plan: Plan, index: int, lock: threading.Lock) -> None:
        """`lock`: held while rows and errors of the environment, which all lanes share, are appended."""
        self._env = env
        self._plan = plan
        self._index = index
        self._lock = lock
        self._subjects: dict[int, tuple[Subject, ExitStack]] = {}
        """The guests, by `Job.checked`, each with what ends it."""

    def run(self, job: Job) -> None:
        """Runs a job, and appends its row."""
        kind = BY_NAME[job.kind]
        seed = 1000 * job.block + self._index
        row = Row(kind=job.kind, of_class=kind.of_class, checked=job.checked, block=job.block, seed=seed)
        began = time.monotonic()
        try:
            one_run(self._env, self._subject(job.checked), kind, row, self._plan)
        except (NoAnswerError, RekindleError, OSError, ValueError) as error:
            row.note = f"{row.note} {type(error).__name__}: {error}".strip()[:400]
            self._env.log(f"{job.kind}: {row.note}")
            with self._lock:
                self._env.errors.append(f"run {job.block} of {job.label}: {row.note}")
            # The state of the guest is unknown, so the guest is not used again.
            if job.checked in self._subjects:
                self._subjects.pop(job.checked)[1].close()
        row.us = int((time.monotonic() - began) * 1e6)
        with self._lock:
            self._env.rows.append(row)

    def _subject(self, checked: int) -> Subject:
        if checked not in self._subjects:
            stack = ExitStack()
            self._subjects[checked] = (stack.enter_context(self._env.subject(self._index, checked)), stack)
        return self._subjects[checked][0]

    def close(self) -> None:
        """Ends the guests."""
        with ExitStack() as all_stacks:  # closes the others, too, if one fails
            for _, stack in self._subjects.values():
                all_stacks.callback(stack.close)


def faults(env: FaultEnvironment, plan: Plan) -> None:
    """Runs all faults, several guests at a time."""
    waiting = jobs(plan, env.finished)
    total, lock = len(waiting), threading.Lock()

    def next_job() -> Job | None:
        with lock:
            late = plan.budget_s is not None and time.monotonic() - env.began > plan.budget_s
            return None if late or not waiting or stopping.is_set() else waiting.pop(0)

    def run_jobs(index: int) -> None:
        lane = Lane(env, plan, index, lock)
        try:
            while job := next_job():
                env.log(f"run {total - len(waiting)} of {total}: {job.label}")
                lane.run(job)
        finally:
            lane.close()

    stopping = threading.Event()
    in_lanes(plan.lanes, run_jobs, stopping, lambda: env.left_out.append(f"{len(waiting)} of {total} runs: broken off"))
    if waiting:
        env.left_out.append(f"{len(waiting)} of {total} runs: no time left for them")


def in_lanes(
    count: int, lane: Callable[[int], None], stopping: threading.Event, broken_off: Callable[[], None]
) -> None:
    """Runs all lanes. On an interrupt, notifies them by `stopping` and still waits for all.

    `Thread.join` cannot be used: after an interrupt it treats a running thread as ended (bpo-45274).
    """
    ended = [threading.Event() for _ in range(count)]

    def run(index: int) -> None:
        try:
            lane(index)
        finally:
            ended[index].set()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    try:
        for thread in threads:
            thread.start()
        for lane_ended in ended:
            lane_ended.wait()
    except BaseException:
        stopping.set()
        for thread, lane_ended in zip(threads, ended, strict=True):
            # `ident` is `None` if the thread was never started.
            while not lane_ended.wait(0.1) and thread.ident is not None:
                pass
        broken_off()
        raise


def one_run(env: FaultEnvironment, subject: Subject, kind: Kind, row: Row, plan: Plan) -> None:
    """Injects faults of one type, reboots, and compares every block."""
    rng = random.Random(f"{row.block} {kind.name} {row.checked}")
    generation, console_length = subject.generation(), len(subject.console())
    _require_ok(subject.ask(f"fill vda {BLOCKS}", 60.0), "fill")
    host = subject.guest.host_address.split("/")[0]
    _require_ok(subject.ask(f"load vda {BLOCKS} {row.seed} {host}"), "load")
    with subject.traffic():
        _wait_loaded(subject)
        try:
            row.put, row.hit = inject(env, subject, kind, rng)
        except NoAnswerError as error:
            # The guest may end while the faults are injected.
            row.put, row.note = kind.count, f"{error}"[:100]
        _poll_until(time.monotonic() + plan.wait_s, lambda: subject.generation() != generation)
        row.outcome = outcome(subject, generation)
    row.way = boot_again(subject, generation, row)
    subject.wait_ready()
    row.oops = int(complaints(subject.console()[console_length:]))
    compare(subject, row)


def _require_ok(answer: str, command: str) -> None:
    if not answer.startswith("ok"):
        raise RekindleError(f"{command}: {answer}")


def _poll_until(deadline: float, happened: Callable[[], bool]) -> bool:
    """Polls until the deadline; returns whether `happened` returned true."""
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.05)
    return happened()


def _wait_loaded(subject: Subject) -> None:
    """Waits until the guest's load has read, written and sent something."""
    if not _poll_until(time.monotonic() + 30.0, lambda: min(subject.progress(10.0)) >= LOADED):
        raise RekindleError(f"{subject.guest.name}: its load does nothing")


def inject(env: FaultEnvironment, subject: Subject, kind: Kind, rng: random.Random) -> tuple[int, list[int]]:
    """Injects the faults; returns how many, and the blocks whose page-cache frames the faults hit, where known."""
    if kind.method == "nothing":
        return 0, []
    if kind.method == "line":
        _require_ok(subject.ask(f"fault {kind.name} {kind.count} {rng.randrange(1 << 32)}", 5.0), f"fault {kind.name}")
        return kind.count, []
    if kind.method == "code":
        return _change_code(env, subject, kind, rng), []
    stacks = subject.receive("cat /proc/rekindle-fault", None).decode() if kind.method == "stack" else ""
    queue = subject.receive_queue() if kind.method == "dma" else {}
    ram = Ram(subject.ram_file())
    try:
        if kind.method == "stack":
            return ram.flip_stacks(stacks, kind.count, rng), []
        cached = ram.cached(subject.image())
        if kind.method == "overrun":
            copies = ram.overrun_cached(cached, kind.count, rng)
            return len(copies), sorted({cached[frame] for frames in copies for frame in frames if frame in cached})
        if kind.method == "dma":
            frames = ram.give_to_card(queue, cached, kind.count, rng)
        else:
            frames = ram.flip_cached(cached, kind.count, rng)
        return len(frames), sorted(cached[frame] for frame in frames)
    finally:
        ram.close()


def _change_code(env: FaultEnvironment, subject: Subject, kind: Kind, rng: random.Random) -> int:
    if env.code is None:
        raise ValueError("the kernel's code is not known")
    changed = 0
    for tries, change in enumerate(env.code.changes(kind.name, rng)):
        if changed == kind.count or tries == TRIES * kind.count:
            return changed
        try:
            changed += subject.ask(f"fault {change.line}", 3.0).startswith("ok")
        except NoAnswerError:
            # The change ended the guest, so it was injected.
            return changed + 1
    return changed


def outcome(subject: Subject, generation: int) -> str:
    """Classifies the guest's state; docs/fault-experiment.md defines the outcomes."""
    if subject.generation() != generation:
        return "crashed"
    if not subject.qemu_alive() and not subject.busy():
        return "died"
    answered, before = False, None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            now = subject.progress(max(deadline - time.monotonic(), 0.2))  # s to wait for the answer
        except (NoAnswerError, ValueError):
            continue
        if before is not None and all(new > old for new, old in zip(now, before, strict=True)):
            return "went on"
        answered, before = True, before or now
        time.sleep(0.1)
    if subject.generation() != generation or subject.busy():
        return "crashed"
    return "stalled" if answered else "hung"


def boot_again(subject: Subject, generation: int, row: Row) -> str:
    """Ensures that the guest is rebooted; returns the way: see `Row.way`."""
    if row.outcome == "crashed":
        _wait_booted(subject, generation)
        return "watch"
    if row.outcome == "died":
        subject.rekindle.call("recover", subject.guest.name)
        return "recover"
    try:
        subject.rekindle.call("reboot", subject.guest.name, "--how", "warm-cache")
    except RekindleError as error:
        # The guest may have ended meanwhile.
        row.note = f"{row.note} {error}".strip()[:300]
        _wait_booted(subject, generation)
        return "watch"
    return "host"


def _wait_booted(subject: Subject, generation: int) -> None:
    is_booted = _poll_until(
        time.monotonic() + REBOOT_S,
        lambda: subject.generation() != generation and subject.qemu_alive() and not subject.busy(),
    )
    if not is_booted:
        raise RekindleError(f"{subject.guest.name}: crashed and was not booted within {REBOOT_S:g} s")


def compare(subject: Subject, row: Row) -> None:
    """Compares every block that the guest can read with the disk."""
    seen, image = subject.seen(), subject.image()
    wrong = np.nonzero((seen != image).any(axis=1))[0]
    row.compared, row.wrong, row.where = len(image), len(wrong), [int(block) for block in wrong[:LISTED]]
    row.hit_wrong = int(np.isin(row.hit, wrong).sum())
    status = subject.status()
    if bool(status.get("unchecked", False)) == bool(row.checked):
        raise RekindleError("the disk server is not the expected one: " + str(status))
    # `attic`: blocks that are still retained, and counts of the others. `emptied`: the counts once none is retained.
    still_retained, counts = status["attic"] or (0, status["emptied"])
    if counts is None:
        row.note = f"{row.note} nothing was kept".strip()
        row.kept = row.served = row.refused = row.overwritten = row.dropped = 0
        return
    row.served, row.refused = counts["served"], counts["refused"]
    row.overwritten, row.dropped = counts["overwritten"], counts["dropped"]
    row.kept = still_retained + sum(counts.values())


CASES: dict[str, Callable[[FaultEnvironment, Plan], None]] = {"faults": faults}
