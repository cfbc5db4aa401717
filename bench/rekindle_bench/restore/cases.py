"""The cases of restores, listed in `CASES` at the end.

Guests are *protected* (checkpoints of them are committed to a store), crash, and are restored in turn. Each restore
appends rows for the analysis.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

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
        row.demanded_pages, row.filled_pages = filled.demanded, filled.background
    env.rows.append(row)


@dataclass(frozen=True)
class Crashed:
    """A guest that has crashed, and what is needed to restore it."""

    guest: Guest
    store: Store
    shown: dict[str, Any]
    """Output of `rekindle show` from before the crash, for the peer's QEMU."""


def restore(env: RestoreEnvironment, plan: Plan) -> None:
    """Measures figure 4: command to guest running, by size, lazily, eagerly, and QEMU's load of a full save, in turn.

    Each guest compiles when its checkpoint is taken. Then its host dies, and the guest is restored from that checkpoint
    repeatedly. Only one guest runs at a time.
    """
    with ExitStack() as stack:
        crashed: list[Crashed] = []
        for index, mib in enumerate(plan.ways_by_mib, start=1):
            env.log(f"restore: starting a guest with {size(mib)}")
            guest, work = stack.enter_context(env.working(f"back{mib}", mib, index, plan.touch.get(mib)))
            work.loop("compile")
            store = env.store("disk").fresh(guest.name)
            stack.callback(store.remove)
            _protect(env, guest, store)
            shown = env.rekindle.show(guest.name)
            if plan.ways_by_mib[mib].get("incoming", 0):
                saved = env.disk_dir / f"{guest.name}.save"
                stack.callback(saved.unlink, missing_ok=True)
                with env.qmp(guest) as qmp:
                    snapshot.save(qmp, "full", saved)
            env.crash(guest.name)
            crashed.append(Crashed(guest, store, shown))
        for round_number in range(max(n for wanted in plan.ways_by_mib.values() for n in wanted.values())):
            for guest, store, shown in ((each.guest, each.store, each.shown) for each in crashed):
                repetitions = plan.ways_by_mib[guest.memory_mib]
                ways = [how for how in repetitions if round_number < repetitions[how]]
                env.log(f"restore: {size(guest.memory_mib)}: round {round_number + 1}: {', '.join(ways) or 'nothing'}")
                for how in ways:
                    row = Row(
                        case="restore",
                        what="restore",
                        memory_mib=guest.memory_mib,
                        workload="compile",
                        store="disk",
                        how=how,
                        round=round_number,
                    )
                    if how == "incoming":
                        _incoming(env, guest, shown, row)
                    else:
                        _restore(env, guest.name, store, row, *(["--eager"] if how == "eager" else []))
                        env.crash(guest.name)
        for each in crashed:  # so that each guest's context has a VM to stop
            env.restore(each.guest.name, each.store)


def _incoming(env: RestoreEnvironment, guest: Guest, shown: dict[str, Any], row: Row) -> None:
    """Measures QEMU's own load of a full save, also from the disk. `shown`: see `Crashed`."""
    path = env.disk_dir / f"{guest.name}.save"
    forget(path)
    vmm, line = shown["vmm"], shown["command_line"]
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
        all_stores = [env.store(kind).fresh(f"from-{kind}") for kind in plan.stores if env.has_store(kind)]
        for store in all_stores:
            _protect(env, guest, store)
        for round_number in range(plan.store_restores):
            env.log(f"stores: round {round_number + 1} of {plan.store_restores}")
            for store in all_stores:
                env.crash(guest.name)
                row = Row(
                    case="stores",
                    what="restore",
                    memory_mib=MEMORY_MIB,
                    workload="compile",
                    store=store.kind,
                    how="lazy",
                    round=round_number,
                )
                _restore(env, guest.name, store, row)
        for store in all_stores:
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
        for round_number in range(plan.prepared_restores):
            env.log(f"prepared: round {round_number + 1} of {plan.prepared_restores}")
            for how in ("prepared", "lazy"):
                env.crash(guest.name)
                row = Row(
                    case="prepared",
                    what="restore",
                    memory_mib=MEMORY_MIB,
                    workload="compile",
                    store="disk",
                    how=how,
                    round=round_number,
                )
                if how == "prepared":
                    env.rekindle.call("restore", guest.name, "--store", store.url, *store.options, "--prepare")
                    row.resident_kib = env.resident_kib(guest.name)
                _restore(env, guest.name, store, row)
        store.remove()


def after(workload: str) -> Callable[[RestoreEnvironment, Plan], None]:
    """Returns the case of table II: the second half of a workload after a restore, by turns with an undisturbed one."""

    def case(env: RestoreEnvironment, plan: Plan) -> None:
        pairs = plan.crashes_by_workload.get(workload, 0)
        if not pairs:
            return
        piece = plan.pieces[workload]
        with env.working("after", MEMORY_MIB, 12) as (guest, work):
            work.run(workload, piece.count, piece.first)  # fills the guest's page cache with all files of the workload
            for round_number in range(pairs):
                env.log(f"after: {workload}: pair {round_number + 1} of {pairs}")
                whole = work.run(workload, piece.count, piece.first)
                _cut(env, guest, work, workload, piece, whole, round_number)

    return case


def _cut(
    env: RestoreEnvironment, guest: Guest, work: Work, workload: str, piece: Piece, whole: Window, round_number: int
) -> None:
    """Crashes the guest in the middle of its work and restores it; appends rows of the restore and of both windows.

    `whole`: the same work, undisturbed.
    """
    store = env.store("disk").fresh(f"after-{workload}")
    common = {"case": "after", "memory_mib": MEMORY_MIB, "workload": workload, "store": "disk", "round": round_number}
    row = Row(what="restore", how="lazy", **common)
    stopped_us: list[int] = []  # when the guest was stopped for the checkpoint from which it is restored
    restored: list[Restored] = []
    with protected(env.rekindle, guest.name, store, "2s") as protector:

        def crash_once(window: Window) -> None:
            _, progress = window.marks[-1]
            if restored or progress < piece.cut or len(protector.of("checkpoint")) < 2:
                return
            protector.stop()
            stopped_us.append(protector.of("checkpoint")[-1]["stopped_host_us"])
            env.crash(guest.name)
            store.forget()
            restored.append(env.restore(guest.name, store))

        window = work.run(workload, piece.count, piece.first, at=crash_once)
    if not restored:
        raise RekindleError(f"{workload}: finished before it could be interrupted; give it more units")
    filled = env.wait_filled(guest.name, restored[0].resumed_host_us)
    row.restore_us, row.told_us, row.steps = restored[0].restore_us, restored[0].reported_us, restored[0].steps
    row.demanded_pages, row.filled_pages, row.worst_us = filled.demanded, filled.background, filled.worst_us
    env.rows.append(row)
    position = window.position(stopped_us[0] / 1e6, whole)
    for how, measured, from_us in (
        ("undisturbed", whole, whole.reached(position) * 1e6),
        ("lazy", window, float(restored[0].resumed_host_us)),
    ):
        env.rows.append(
            Row(
                what="window",
                how=how,
                units=measured.count,
                position=round(position, 3),
                rest_us=int(measured.ended * 1e6 - from_us),
                digest=measured.digest,
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
