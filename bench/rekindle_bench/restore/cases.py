"""The cases: guests are protected, crash, and are restored in turn. Each restore appends rows for the analysis."""

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

from .crashed_guests import Restored, RestoreEnvironment
from .elsewhere import elsewhere
from .plan import Piece, Plan
from .rows import Row

MEMORY_MIB = 512
"""RAM of the paper's guest."""
FILLS = 3
"""Number of rounds that wait until all memory is loaded. Not all rounds wait: with 8G that takes most of the time."""


def _protect(env: RestoreEnvironment, guest: Guest, store: Store, checkpoints: int = 3) -> None:
    """Takes some checkpoints of a guest while it works."""
    with protected(env.rekindle, guest.name, store, "1s", None, "--count", str(checkpoints)) as protector:
        protector.wait("checkpoint", checkpoints)
        protector.join()


def _restore(env: RestoreEnvironment, name: str, store: Store, row: Row, *options: str) -> None:
    """Restores from a store that is read from its disk, and appends the row.

    In the first `FILLS` rounds, also waits until all of the guest's memory is loaded.
    """
    store.forget()
    restored = env.restore(name, store, *options)
    row.restore_us, row.told_us, row.steps = restored.restore_us, restored.reported_us, restored.steps
    if "--eager" not in options and row.round < FILLS:
        filled = env.wait_filled(name, restored.resumed_host_us)
        row.fill_us, row.worst_us = filled.fill_us, filled.worst_us
        row.demanded_pages, row.filled_pages = filled.demanded, filled.behind
    env.rows.append(row)


def restore(env: RestoreEnvironment, plan: Plan) -> None:
    """Measures figure 4: command to guest running, by size, lazily, eagerly, and QEMU's load of a full save, in turn.

    Each guest compiles when its checkpoint is taken. Then its host dies, and the guest is restored from that checkpoint
    repeatedly. Only one guest runs at a time.
    """
    with ExitStack() as stack:
        ready: list[tuple[Guest, Store, dict[str, object]]] = []
        for index, mib in enumerate(plan.restore, start=1):
            env.log(f"restore: starting a guest with {size(mib)}")
            guest, work = stack.enter_context(env.working(f"back{mib}", mib, index, plan.touch.get(mib)))
            work.loop("compile")
            store = env.store("disk").fresh(guest.name)
            stack.callback(store.remove)
            _protect(env, guest, store)
            shown = env.rekindle.show(guest.name)
            if plan.restore[mib].get("incoming", 0):
                saved = env.disk_dir / f"{guest.name}.save"
                stack.callback(saved.unlink, missing_ok=True)
                with env.qmp(guest) as qmp:
                    snapshot.save(qmp, "full", saved)
            env.crash(guest.name)
            ready.append((guest, store, shown))
        for number in range(max(n for wanted in plan.restore.values() for n in wanted.values())):
            for guest, store, shown in ready:
                wanted = plan.restore[guest.memory_mib]
                todo = [how for how in wanted if number < wanted[how]]
                env.log(f"restore: {size(guest.memory_mib)}: round {number + 1}: {', '.join(todo) or 'nothing'}")
                for how in todo:
                    row = Row("restore", "restore", guest.memory_mib, "compile", "disk", how, number)
                    if how == "incoming":
                        _incoming(env, guest, shown, row)
                    else:
                        _restore(env, guest.name, store, row, *(["--eager"] if how == "eager" else []))
                        env.crash(guest.name)
        for guest, store, _ in ready:  # so that each guest's context has a VM to stop
            env.restore(guest.name, store)


def _incoming(env: RestoreEnvironment, guest: Guest, shown: dict[str, object], row: Row) -> None:
    """Measures QEMU's own load of a full save, also from the disk."""
    path = env.disk_dir / f"{guest.name}.save"
    forget(path)
    vmm, line = shown["vmm"], shown["command_line"]
    assert isinstance(vmm, dict) and isinstance(line, list)
    tap = Tap(f"rki{os.getpid() % 100000}x{guest.index}", guest.netns, guest.host_address)
    try:
        folder = env.work / f"{guest.name}-incoming"
        ram = env.ram_dir / f"{guest.name}-incoming.ram"
        restored = snapshot.restore(env.qemu, line, vmm["directory"], folder, path, tap, ram)
    finally:
        tap.close()
    row.restore_us, row.steps = restored.restore_us, restored.steps
    env.rows.append(row)


def stores(env: RestoreEnvironment, plan: Plan) -> None:
    """Measures lazy restores from each kind of store: the paper compares disk and SSD."""
    with env.working("from", MEMORY_MIB, 10) as (guest, work):
        work.loop("compile")
        places = [env.store(kind).fresh(f"from-{kind}") for kind in plan.stores if env.has_store(kind)]
        for store in places:
            _protect(env, guest, store)
        for number in range(plan.store_restores):
            env.log(f"stores: round {number + 1} of {plan.store_restores}")
            for store in places:
                env.crash(guest.name)
                row = Row("stores", "restore", MEMORY_MIB, "compile", store.kind, "lazy", number)
                _restore(env, guest.name, store, row)
        for store in places:
            store.remove()


def prepared(env: RestoreEnvironment, plan: Plan) -> None:
    """Restores by turns into a prepared QEMU and without one; measures the memory of the prepared one."""
    if not env.knows_prepare():
        env.left_out.append("case prepared: this rekindle has no `restore --prepare`")
        return
    with env.working("spare", MEMORY_MIB, 11) as (guest, work):
        work.loop("compile")
        store = env.store("disk").fresh("spare")
        _protect(env, guest, store)
        for number in range(plan.prepared):
            env.log(f"prepared: round {number + 1} of {plan.prepared}")
            for how in ("prepared", "lazy"):
                env.crash(guest.name)
                row = Row("prepared", "restore", MEMORY_MIB, "compile", "disk", how, number)
                if how == "prepared":
                    env.rekindle.call("restore", guest.name, "--store", store.url, *store.options, "--prepare")
                    row.resident_kib = env.resident_kib(guest.name)
                _restore(env, guest.name, store, row)
        store.remove()


def after(workload: str) -> Callable[[RestoreEnvironment, Plan], None]:
    """Returns the case of table II: the second half of a workload after a restore, by turns with an undisturbed one."""

    def case(env: RestoreEnvironment, plan: Plan) -> None:
        pairs = plan.after.get(workload, 0)
        if not pairs:
            return
        piece = plan.pieces[workload]
        with env.working("after", MEMORY_MIB, 12) as (guest, work):
            work.run(workload, piece.count, piece.first)  # fills the guest's page cache with all files of the workload
            for number in range(pairs):
                env.log(f"after: {workload}: pair {number + 1} of {pairs}")
                whole = work.run(workload, piece.count, piece.first)
                _cut(env, guest, work, workload, piece, whole, number)

    return case


def _cut(
    env: RestoreEnvironment, guest: Guest, work: Work, workload: str, piece: Piece, whole: Window, number: int
) -> None:
    """Crashes and restores in the middle of the work. `whole`: the same work, undisturbed."""
    store = env.store("disk").fresh(f"after-{workload}")
    common = {"case": "after", "memory_mib": MEMORY_MIB, "workload": workload, "store": "disk", "round": number}
    row = Row(what="restore", how="lazy", **common)
    stopped: list[int] = []
    restored: list[Restored] = []
    with protected(env.rekindle, guest.name, store, "2s") as protector:

        def half(window: Window) -> None:
            if restored or window.marks[-1][1] < piece.cut or len(protector.of("checkpoint")) < 2:
                return
            protector.stop()
            stopped.append(protector.of("checkpoint")[-1]["stopped_host_us"])
            env.crash(guest.name)
            store.forget()
            restored.append(env.restore(guest.name, store))

        window = work.run(workload, piece.count, piece.first, at=half)
    if not restored:
        raise RekindleError(f"{workload}: finished before it could be interrupted; give it more units")
    filled = env.wait_filled(guest.name, restored[0].resumed_host_us)
    row.restore_us, row.told_us, row.steps = restored[0].restore_us, restored[0].reported_us, restored[0].steps
    row.demanded_pages, row.filled_pages, row.worst_us = filled.demanded, filled.behind, filled.worst_us
    env.rows.append(row)
    position = window.position(stopped[0] / 1e6, whole)
    resumed = restored[0].resumed_host_us
    for how, one, from_us in (
        ("undisturbed", whole, whole.reached(position) * 1e6),
        ("lazy", window, float(resumed)),
    ):
        env.rows.append(
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


CASES: dict[str, Callable[[RestoreEnvironment, Plan], None]] = {
    "restore": restore,
    "prepared": prepared,
    "after-compile": after("compile"),
    "after-transcode": after("transcode"),
    "stores": stores,
    "elsewhere": elsewhere,
}
