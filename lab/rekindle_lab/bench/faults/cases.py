"""The case: faults, a warm-cache reboot, and every block compared. Nothing is judged here."""

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from rekindle_lab.rekindle import RekindleError

from .kinds import BY_NAME, Kind
from .plan import BLOCKS, Plan
from .ram import Ram
from .rows import Row
from .stage import Gone, Stage, Subject, complaints

PATIENCE_S = 4.0
"""How long a guest may take to answer, and its load to go on, before it counts as hung."""
REBOOT_S = 60.0
TRIES = 5
"""How often a change of code is tried elsewhere where the module refuses it: the kernel has changed that itself."""
TOLD = 10


def jobs(plan: Plan, done: dict[tuple[str, int], int]) -> list[tuple[int, str, int]]:
    """Block, type and whether it is checked, for each run that is left.

    A block has each type once, in a new order: one that is broken off has as many of each.
    """
    every = max(plan.runs // plan.unchecked, 1) if plan.unchecked else 0
    left = []
    for block in range(plan.runs):
        names = list(plan.kinds)
        random.Random(block).shuffle(names)
        left += [(block, name, 1) for name in names if block >= done.get((name, 1), 0)]
        if every and block % every == 0 and block // every < plan.unchecked:
            left += [(block, name, 0) for name in names if block // every >= done.get((name, 0), 0)]
    return left


def faults(stage: Stage, plan: Plan) -> None:
    """All runs, several guests at a time."""
    waiting = jobs(plan, stage.done)
    total, lock = len(waiting), threading.Lock()

    def next_job() -> tuple[int, str, int] | None:
        with lock:
            late = plan.budget_s is not None and time.monotonic() - stage.began > plan.budget_s
            return None if late or not waiting or stopping.is_set() else waiting.pop(0)

    def lane(index: int) -> None:
        subjects: dict[int, tuple[Subject, ExitStack]] = {}
        try:
            while job := next_job():
                block, name, checked = job
                stage.say(f"run {total - len(waiting)} of {total}: {name}{'' if checked else ', unchecked'}")
                row = Row(name, BY_NAME[name].of_class, checked, block, 1000 * block + index)
                began = time.monotonic()
                try:
                    if checked not in subjects:
                        stack = ExitStack()
                        subjects[checked] = (stack.enter_context(stage.subject(index, checked)), stack)
                    one_run(stage, subjects[checked][0], BY_NAME[name], row, plan)
                except (Gone, RekindleError, OSError, ValueError) as error:
                    # It is in no state to be used again.
                    row.note = f"{row.note} {type(error).__name__}: {error}".strip()[:400]
                    stage.say(f"{name}: {row.note}")
                    with lock:
                        stage.errors.append(f"run {block} of {name}{'' if checked else ', unchecked'}: {row.note}")
                    if checked in subjects:
                        subjects.pop(checked)[1].close()
                row.us = int((time.monotonic() - began) * 1e6)
                with lock:
                    stage.rows.append(row)
        finally:
            with ExitStack() as all_of:
                for _, stack in subjects.values():
                    all_of.callback(stack.close)

    stopping = threading.Event()
    in_lanes(plan.lanes, lane, stopping, lambda: stage.left_out.append(f"{len(waiting)} of {total} runs: broken off"))
    if waiting:
        stage.left_out.append(f"{len(waiting)} of {total} runs: no time left for them")


def in_lanes(
    count: int, lane: Callable[[int], None], stopping: threading.Event, broken_off: Callable[[], None]
) -> None:
    """Run lanes to their end. Where that is interrupted they are told by `stopping`, and waited for all the same.

    Not by `Thread.join`: one that was interrupted takes a thread that runs for one that has ended (bpo-45274).
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
        for one in ended:
            one.wait()
    except BaseException:
        stopping.set()
        for thread, one in zip(threads, ended, strict=True):
            while not one.wait(0.1) and thread.ident is not None:  # else it was never started
                pass
        broken_off()
        raise


def one_run(stage: Stage, subject: Subject, kind: Kind, row: Row, plan: Plan) -> None:
    """Faults of one type, a reboot, and the comparison."""
    rng = random.Random(f"{row.block} {kind.name} {row.checked}")
    generation, said = subject.generation(), len(subject.console())
    _ok(subject.ask(f"fill vda {BLOCKS}", 60.0), "fill")
    host = subject.guest.host_address.split("/")[0]
    _ok(subject.ask(f"load vda {BLOCKS} {row.seed} {host}"), "load")
    with subject.traffic():
        _wait_loaded(subject)
        try:
            row.put, row.hit = put_in(stage, subject, kind, rng)
        except Gone as gone:
            # It may end while it is being told.
            row.put, row.note = kind.count, f"{gone}"[:100]
        _look_until(time.monotonic() + plan.wait_s, lambda: subject.generation() != generation)
        row.outcome = outcome(subject, generation)
    row.way = boot_again(subject, generation, row)
    subject.wait_ready()
    row.oops = int(complaints(subject.console()[said:]))
    compare(subject, row)


def _ok(answer: str, what: str) -> None:
    if not answer.startswith("ok"):
        raise RekindleError(f"{what}: {answer}")


def _look_until(deadline: float, happened: Callable[[], bool]) -> bool:
    """Whether something happens until then."""
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.05)
    return happened()


def _wait_loaded(subject: Subject) -> None:
    """Until its load has read, written and sent something."""
    if not _look_until(time.monotonic() + 30.0, lambda: min(subject.progress(10.0)) >= 50):
        raise RekindleError(f"{subject.guest.name}: its load does nothing")


def put_in(stage: Stage, subject: Subject, kind: Kind, rng: random.Random) -> tuple[int, list[int]]:
    """Put the faults in; gives how many, and the blocks whose page-cache frames they hit, where that is known."""
    if kind.how == "nothing":
        return 0, []
    if kind.how == "line":
        _ok(subject.ask(f"fault {kind.name} {kind.count} {rng.randrange(1 << 32)}", 5.0), f"fault {kind.name}")
        return kind.count, []
    if kind.how == "code":
        return _change_code(stage, subject, kind, rng), []
    stacks = subject.receive("cat /proc/rekindle-fault", None).decode() if kind.how == "stack" else ""
    queue = subject.receive_queue() if kind.how == "dma" else {}
    ram = Ram(subject.ram_file())
    try:
        if kind.how == "stack":
            return ram.flip_stacks(stacks, kind.count, rng), []
        cached = ram.cached(subject.image())
        if kind.how == "overrun":
            copies = ram.overrun_cached(cached, kind.count, rng)
            return len(copies), sorted({cached[frame] for frames in copies for frame in frames if frame in cached})
        if kind.how == "dma":
            frames = ram.give_to_card(queue, cached, kind.count, rng)
        else:
            frames = ram.flip_cached(cached, kind.count, rng)
        return len(frames), sorted(cached[frame] for frame in frames)
    finally:
        ram.close()


def _change_code(stage: Stage, subject: Subject, kind: Kind, rng: random.Random) -> int:
    if stage.code is None:
        raise ValueError("the kernel's code is not known")
    done = 0
    for tried, change in enumerate(stage.code.changes(kind.name, rng)):
        if done == kind.count or tried == TRIES * kind.count:
            return done
        try:
            done += subject.ask(f"fault {change.line}", 3.0).startswith("ok")
        except Gone:
            # This one was too much for it: it was put in.
            return done + 1
    return done


def outcome(subject: Subject, generation: int) -> str:
    """What became of the guest; docs/fault-experiment.md says what the words mean."""
    if subject.generation() != generation:
        return "crashed"
    if not subject.qemu_alive() and not subject.busy():
        return "died"
    answered = before = None
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            now = subject.progress(max(deadline - time.monotonic(), 0.2))
        except (Gone, ValueError):
            continue
        if before is not None and all(new > old for new, old in zip(now, before, strict=True)):
            return "went on"
        answered, before = True, before or now
        time.sleep(0.1)
    if subject.generation() != generation or subject.busy():
        return "crashed"
    return "stalled" if answered else "hung"


def boot_again(subject: Subject, generation: int, row: Row) -> str:
    """See to it that the guest is rebooted; gives who did it."""
    if row.outcome == "crashed":
        _booted(subject, generation)
        return "watch"
    if row.outcome == "died":
        subject.rekindle.call("recover", subject.guest.name)
        return "recover"
    try:
        subject.rekindle.call("reboot", "os", subject.guest.name, "--how", "warm-cache")
    except RekindleError as error:
        # It may have ended by itself meanwhile.
        row.note = f"{row.note} {error}".strip()[:300]
        _booted(subject, generation)
        return "watch"
    return "host"


def _booted(subject: Subject, generation: int) -> None:
    done = _look_until(
        time.monotonic() + REBOOT_S,
        lambda: subject.generation() != generation and subject.qemu_alive() and not subject.busy(),
    )
    if not done:
        raise RekindleError(f"{subject.guest.name}: crashed and was not booted within {REBOOT_S:g} s")


def compare(subject: Subject, row: Row) -> None:
    """Every block that the guest can read with the disk."""
    seen, image = subject.seen(), subject.image()
    wrong = np.nonzero((seen != image).any(axis=1))[0]
    row.compared, row.wrong, row.where = len(image), len(wrong), [int(block) for block in wrong[:TOLD]]
    row.hit_wrong = int(np.isin(row.hit, wrong).sum())
    status = subject.status()
    if bool(status.get("unchecked", False)) == bool(row.checked):
        raise RekindleError("the server is not the one that was wanted: " + str(status))
    left, told = status["attic"] or (0, status["emptied"])
    if told is None:
        row.note = f"{row.note} nothing was kept".strip()
        row.kept = row.served = row.refused = row.overwritten = row.dropped = 0
        return
    row.served, row.refused = told["served"], told["refused"]
    row.overwritten, row.dropped = told["overwritten"], told["dropped"]
    row.kept = left + sum(told.values())


CASES: dict[str, Callable[[Stage, Plan], None]] = {"faults": faults}
