"""The cases of restores, listed in `CASES` at the end.

Guests are *protected* (checkpoints of them are committed to a store), crash, and are restored in turn. Each restore
appends rows for the analysis.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
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
ROUNDS_WITH_FILL = 3
"""Number of rounds that wait until all memory is loaded. Not all rounds wait: with 8G that takes most of the time."""


def _restore_row(case: str, how: str, round_number: int, *, memory_mib: int = MEMORY_MIB, store: str = "disk") -> Row:
    """Returns a row for a restore of a guest that compiled, without the measured values."""
    return Row(
        case=case,
        what="restore",
        memory_mib=memory_mib,
        workload="compile",
        store=store,
        how=how,
        round=round_number,
    )


def _protect(env: RestoreEnvironment, guest: Guest, store: Store, checkpoints: int = 3) -> None:
    """Takes some checkpoints of a guest while it works."""
    with protected(env.rekindle, guest.name, store, "1s", None, "--count", str(checkpoints)) as protector:
        protector.wait("checkpoint", checkpoints)
        protector.join()


def _restore(env: RestoreEnvironment, name: str, store: Store, row: Row, *options: str) -> None:
    """Restores from a store that is read from its disk, and appends the row.

    In the first `ROUNDS_WITH_FILL` rounds, also waits until all of the guest's memory is loaded.
    """
    store.forget()
    restored = env.restore(name, store, *options)
    row.restore_us, row.told_us, row.steps = restored.restore_us, restored.reported_us, restored.steps
    if "--eager" not in options and row.round < ROUNDS_WITH_FILL:
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
        crashed = [_crash_guest(env, stack, plan, index, mib) for index, mib in enumerate(plan.ways_by_mib, start=1)]
        most_rounds = max(count for counts in plan.ways_by_mib.values() for count in counts.values())
        for round_number in range(most_rounds):
            for one in crashed:
                _restore_by_each_way(env, one, plan.ways_by_mib[one.guest.memory_mib], round_number)
        for one in crashed:  # so that each guest's context has a VM to stop
            env.restore(one.guest.name, one.store)


def _crash_guest(env: RestoreEnvironment, stack: ExitStack, plan: Plan, index: int, mib: int) -> Crashed:
    """Boots a guest, takes its checkpoint and, if the plan needs it, its full save; then ends it as its host would.

    `stack`: stops the guest and removes its files. `index`: `Guest.index`.
    """
    env.log(f"restore: starting a guest with {size(mib)}")
    guest, work = stack.enter_context(env.working(f"back{mib}", mib, index, plan.touch.get(mib)))
    work.loop("compile")
    store = env.store("disk").fresh(guest.name)
    stack.callback(store.remove)
    _protect(env, guest, store)
    shown = env.rekindle.show(guest.name)
    if plan.ways_by_mib[mib].get("incoming", 0):
        save = _full_save(env, guest)
        stack.callback(save.unlink, missing_ok=True)
        with env.qmp(guest) as qmp:
            snapshot.save(qmp, "full", save)
    env.crash(guest.name)
    return Crashed(guest, store, shown)


def _restore_by_each_way(
    env: RestoreEnvironment, crashed: Crashed, repetitions: Mapping[str, int], round_number: int
) -> None:
    """Restores a guest by each way that has this round; afterwards the guest has crashed again."""
    guest, store = crashed.guest, crashed.store
    ways = [how for how, count in repetitions.items() if round_number < count]
    env.log(f"restore: {size(guest.memory_mib)}: round {round_number + 1}: {', '.join(ways) or 'nothing'}")
    for how in ways:
        row = _restore_row("restore", how, round_number, memory_mib=guest.memory_mib)
        if how == "incoming":
            _load_full_save(env, crashed, row)
        else:
            options = ["--eager"] if how == "eager" else []
            _restore(env, guest.name, store, row, *options)
            env.crash(guest.name)


def _full_save(env: RestoreEnvironment, guest: Guest) -> Path:
    """Returns the file of a guest's full save by the peer."""
    return env.disk_dir / f"{guest.name}.save"


def _load_full_save(env: RestoreEnvironment, crashed: Crashed, row: Row) -> None:
    """Measures QEMU's own load of a full save from the disk, and appends the row."""
    guest, shown = crashed.guest, crashed.shown
    path = _full_save(env, guest)
    forget(path)
    tap = Tap(f"rki{os.getpid() % 100000}x{guest.index}", guest.netns, guest.host_address)
    try:
        folder = env.work / f"{guest.name}-incoming"
        ram = env.ram_dir / f"{guest.name}-incoming.ram"
        restored = snapshot.restore(env.qemu, shown["command_line"], shown["vmm"]["directory"], folder, path, tap, ram)
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
                row = _restore_row("stores", "lazy", round_number, store=store.kind)
                _restore(env, guest.name, store, row)
        for store in all_stores:
            store.remove()
    env.end_object_store()


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
                row = _restore_row("prepared", how, round_number)
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
                undisturbed = work.run(workload, piece.count, piece.first)
                _crash_in_the_middle(env, guest, work, workload, piece, undisturbed, round_number)

    return case


def _crash_in_the_middle(
    env: RestoreEnvironment,
    guest: Guest,
    work: Work,
    workload: str,
    piece: Piece,
    undisturbed: Window,
    round_number: int,
) -> None:
    """Crashes the guest in the middle of its work and restores it; appends rows of the restore and of both windows.

    `undisturbed`: the same work without a crash.
    """
    store = env.store("disk").fresh(f"after-{workload}")
    common = {"case": "after", "memory_mib": MEMORY_MIB, "workload": workload, "store": "disk", "round": round_number}
    stopped_us: list[int] = []  # when the guest was stopped for the checkpoint from which it is restored
    restored: list[Restored] = []  # the only restore, once it has happened
    with protected(env.rekindle, guest.name, store, "2s") as protector:

        def has_checkpoint_of(window: Window) -> bool:
            # A guest that is restored from an earlier one has not been given the work.
            checkpoints = protector.of("checkpoint")
            return len(checkpoints) >= 2 and checkpoints[-1]["stopped_host_us"] > window.began * 1e6

        def crash_once(window: Window) -> None:
            _, progress = window.marks[-1]
            if restored or progress < piece.units_before_crash or not has_checkpoint_of(window):
                return
            protector.stop()
            stopped_us.append(protector.of("checkpoint")[-1]["stopped_host_us"])
            env.crash(guest.name)
            store.forget()
            restored.append(env.restore(guest.name, store))

        window = work.run(workload, piece.count, piece.first, on_mark=crash_once)
    if not restored:
        raise RekindleError(f"{workload}: finished before it could be interrupted; give it more units")
    env.rows.append(_filled_row(env, guest, restored[0], common))
    units_at_checkpoint = window.units_at_speed_of(undisturbed, stopped_us[0] / 1e6)
    reached_undisturbed_us = undisturbed.time_of_units(units_at_checkpoint) * 1e6
    env.rows.append(_window_row("undisturbed", undisturbed, units_at_checkpoint, reached_undisturbed_us, common))
    env.rows.append(_window_row("lazy", window, units_at_checkpoint, restored[0].resumed_host_us, common))
    if window.digest != undisturbed.digest:
        raise RekindleError(f"{workload}: gave {window.digest} after a restore, {undisturbed.digest} undisturbed")
    store.remove()


def _filled_row(env: RestoreEnvironment, guest: Guest, restored: Restored, common: dict[str, Any]) -> Row:
    """Waits until all memory of a restored guest is loaded, and returns the row of the restore."""
    filled = env.wait_filled(guest.name, restored.resumed_host_us)
    return Row(
        what="restore",
        how="lazy",
        restore_us=restored.restore_us,
        told_us=restored.reported_us,
        demanded_pages=filled.demanded,
        filled_pages=filled.background,
        worst_us=filled.worst_us,
        steps=restored.steps,
        **common,
    )


def _window_row(how: str, window: Window, units: float, since_us: float, common: dict[str, Any]) -> Row:
    """Returns the row of a piece of work, measured since a time at which `units` of it were finished."""
    return Row(
        what="window",
        how=how,
        units=window.count,
        position=round(units, 3),
        rest_us=int(window.ended * 1e6 - since_us),
        digest=window.digest,
        **common,
    )


CASES: dict[str, Callable[[RestoreEnvironment, Plan], None]] = {
    "restore": restore,
    "prepared": prepared,
    "after-compile": after("compile"),
    "after-transcode": after("transcode"),
    "stores": stores,
    "elsewhere": elsewhere,
}
