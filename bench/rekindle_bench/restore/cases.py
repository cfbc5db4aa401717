"""The cases: guests are protected, crash, and are restored in turn; each leaves rows. The analysis judges them."""

import os
from collections.abc import Callable
from contextlib import ExitStack

from rekindle_lab.guests import Guest, size
from rekindle_lab.netns import Tap
from rekindle_lab.peers import snapshot
from rekindle_lab.protector import protected
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.stores import Store, forget
from rekindle_lab.work import Window, Work

from .elsewhere import elsewhere
from .plan import Piece, Plan
from .rows import Row
from .stage import Restored, Stage

MEMORY_MIB = 512
"""The paper's guest."""
FILLS = 3
"""Only the first rounds wait until all memory is loaded: with 8G that takes longer than all else."""


def _protect(stage: Stage, guest: Guest, store: Store, checkpoints: int = 3) -> None:
    """Takes some checkpoints of a guest that works."""
    with protected(stage.rekindle, guest.name, store, "1s", None, "--count", str(checkpoints)) as protector:
        protector.wait("checkpoint", checkpoints)
        protector.join()


def _restore(stage: Stage, name: str, store: Store, row: Row, *options: str) -> None:
    """Restores from a store that is read from its disk, and appends the row.

    In the first rounds waits until the guest has all of its memory, too.
    """
    store.forget()
    restored = stage.restore(name, store, *options)
    row.restore_us, row.told_us, row.steps = restored.restore_us, restored.reported_us, restored.steps
    if "--eager" not in options and row.round < FILLS:
        filled = stage.wait_filled(name, restored.resumed_host_us)
        row.fill_us, row.worst_us = filled.fill_us, filled.worst_us
        row.demanded_pages, row.filled_pages = filled.demanded, filled.behind
    stage.rows.append(row)


def restore(stage: Stage, plan: Plan) -> None:
    """Measures figure 4: command to guest running, by size, lazily, eagerly, and QEMU's load of a full save, in turn.

    Each guest compiles when its checkpoint is taken; then its host dies, and it is restored from that checkpoint
    repeatedly. Only one guest runs at a time.
    """
    with ExitStack() as stack:
        ready: list[tuple[Guest, Store, dict[str, object]]] = []
        for index, mib in enumerate(plan.restore, start=1):
            stage.log(f"restore: starting a guest with {size(mib)}")
            guest, work = stack.enter_context(stage.working(f"back{mib}", mib, index, plan.touch.get(mib)))
            work.loop("compile")
            store = stage.store("disk").fresh(guest.name)
            stack.callback(store.remove)
            _protect(stage, guest, store)
            shown = stage.rekindle.show(guest.name)
            if plan.restore[mib].get("incoming", 0):
                saved = stage.disk_dir / f"{guest.name}.save"
                stack.callback(saved.unlink, missing_ok=True)
                with stage.qmp(guest) as qmp:
                    snapshot.save(qmp, "full", saved)
            stage.crash(guest.name)
            ready.append((guest, store, shown))
        for number in range(max(n for wanted in plan.restore.values() for n in wanted.values())):
            for guest, store, shown in ready:
                wanted = plan.restore[guest.memory_mib]
                todo = [how for how in wanted if number < wanted[how]]
                stage.log(f"restore: {size(guest.memory_mib)}: round {number + 1}: {', '.join(todo) or 'nothing'}")
                for how in todo:
                    row = Row("restore", "restore", guest.memory_mib, "compile", "disk", how, number)
                    if how == "incoming":
                        _incoming(stage, guest, shown, row)
                    else:
                        _restore(stage, guest.name, store, row, *(["--eager"] if how == "eager" else []))
                        stage.crash(guest.name)
        for guest, store, _ in ready:  # for the cleanup of the stages
            stage.restore(guest.name, store)


def _incoming(stage: Stage, guest: Guest, shown: dict[str, object], row: Row) -> None:
    """Measures QEMU's own load, also from the disk."""
    path = stage.disk_dir / f"{guest.name}.save"
    forget(path)
    vmm, line = shown["vmm"], shown["command_line"]
    assert isinstance(vmm, dict) and isinstance(line, list)
    tap = Tap(f"rki{os.getpid() % 100000}x{guest.index}", guest.netns, guest.host_address)
    try:
        folder = stage.work / f"{guest.name}-incoming"
        ram = stage.ram_dir / f"{guest.name}-incoming.ram"
        done = snapshot.restore(stage.qemu, line, vmm["directory"], folder, path, tap, ram)
    finally:
        tap.close()
    row.restore_us, row.steps = done.restore_us, done.steps
    stage.rows.append(row)


def stores(stage: Stage, plan: Plan) -> None:
    """Measures the same from each kind of store: the paper's disk and SSD."""
    with stage.working("from", MEMORY_MIB, 10) as (guest, work):
        work.loop("compile")
        places = [stage.store(kind).fresh(f"from-{kind}") for kind in plan.stores if stage.has_store(kind)]
        for place in places:
            _protect(stage, guest, place)
        for number in range(plan.store_restores):
            stage.log(f"stores: round {number + 1} of {plan.store_restores}")
            for place in places:
                stage.crash(guest.name)
                row = Row("stores", "restore", MEMORY_MIB, "compile", place.kind, "lazy", number)
                _restore(stage, guest.name, place, row)
        for place in places:
            place.remove()


def prepared(stage: Stage, plan: Plan) -> None:
    """Restores into a prepared QEMU, and without one, in turn; measures the memory of the prepared one."""
    if not stage.knows_prepare():
        stage.left_out.append("case prepared: this rekindle has no `restore --prepare`")
        return
    with stage.working("spare", MEMORY_MIB, 11) as (guest, work):
        work.loop("compile")
        store = stage.store("disk").fresh("spare")
        _protect(stage, guest, store)
        for number in range(plan.prepared):
            stage.log(f"prepared: round {number + 1} of {plan.prepared}")
            for how in ("prepared", "lazy"):
                stage.crash(guest.name)
                row = Row("prepared", "restore", MEMORY_MIB, "compile", "disk", how, number)
                if how == "prepared":
                    stage.rekindle.call("restore", guest.name, "--store", store.url, *store.options, "--prepare")
                    row.resident_kib = stage.resident_kib(guest.name)
                _restore(stage, guest.name, store, row)
        store.remove()


def after(workload: str) -> Callable[[Stage, Plan], None]:
    """Measures table II: the second half of a piece of work after a restore, by turns with an undisturbed one."""

    def case(stage: Stage, plan: Plan) -> None:
        pairs = plan.after.get(workload, 0)
        if not pairs:
            return
        piece = plan.pieces[workload]
        with stage.working("after", MEMORY_MIB, 12) as (guest, work):
            work.run(workload, piece.count, piece.first)  # so that the guest has it all in its page cache
            for number in range(pairs):
                stage.log(f"after: {workload}: pair {number + 1} of {pairs}")
                whole = work.run(workload, piece.count, piece.first)
                _cut(stage, guest, work, workload, piece, whole, number)

    return case


def _cut(stage: Stage, guest: Guest, work: Work, workload: str, piece: Piece, whole: Window, number: int) -> None:
    """Crashes and restores in the middle of the work. `whole`: the same work, undisturbed."""
    store = stage.store("disk").fresh(f"after-{workload}")
    common = {"case": "after", "memory_mib": MEMORY_MIB, "workload": workload, "store": "disk", "round": number}
    row = Row(what="restore", how="lazy", **common)
    stopped: list[int] = []
    restored: list[Restored] = []
    with protected(stage.rekindle, guest.name, store, "2s") as protector:

        def half(window: Window) -> None:
            if restored or window.marks[-1][1] < piece.cut or len(protector.of("checkpoint")) < 2:
                return
            protector.stop()
            stopped.append(protector.of("checkpoint")[-1]["stopped_host_us"])
            stage.crash(guest.name)
            store.forget()
            restored.append(stage.restore(guest.name, store))

        window = work.run(workload, piece.count, piece.first, at=half)
    if not restored:
        raise RekindleError(f"{workload}: finished before it could be interrupted; give it more units")
    filled = stage.wait_filled(guest.name, restored[0].resumed_host_us)
    row.restore_us, row.told_us, row.steps = restored[0].restore_us, restored[0].reported_us, restored[0].steps
    row.demanded_pages, row.filled_pages, row.worst_us = filled.demanded, filled.behind, filled.worst_us
    stage.rows.append(row)
    position = window.position(stopped[0] / 1e6, whole)
    resumed = restored[0].resumed_host_us
    for how, one, from_us in (
        ("undisturbed", whole, whole.reached(position) * 1e6),
        ("lazy", window, float(resumed)),
    ):
        stage.rows.append(
            Row(
                what="window",
                how=how,
                units=one.count,
                position=round(position, 3),
                rest_us=int(one.ended * 1e6 - from_us),
                digest=one.digest,
                **common,
            )
        )
    if window.digest != whole.digest:
        raise RekindleError(f"{workload}: gave {window.digest} after a restore, {whole.digest} undisturbed")
    store.remove()


CASES: dict[str, Callable[[Stage, Plan], None]] = {
    "restore": restore,
    "prepared": prepared,
    "after-compile": after("compile"),
    "after-transcode": after("transcode"),
    "stores": stores,
    "elsewhere": elsewhere,
}
