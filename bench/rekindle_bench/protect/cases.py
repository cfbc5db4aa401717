"""The cases of checkpoints, listed in `CASES` at the end.

Each sets up a guest, measures Rekindle and the peers by turns, and appends rows for the analysis. The peers are QEMU's
own saves of a running guest (`rekindle_lab.peers.snapshot`). A *window* is a piece of work in the guest: it compiles or
transcodes, with or without checkpoints meanwhile.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.guests import Guest, size
from rekindle_lab.peers import snapshot
from rekindle_lab.protector import detach, protected
from rekindle_lab.stores import Store
from rekindle_lab.work import Window, Work

from .plan import Pause, Plan
from .rewritten import commit_rewritten, first_commit
from .rows import DEFAULT, ENCRYPTED, PLAIN, POLICIES, Row
from .working_guests import ProtectEnvironment, policy, span

MEMORY_MIB = 512
"""RAM of the paper's guest."""
PAUSE_EVERY_S = 2.0
"""Interval between the checkpoints of case `pause`."""
BEFORE_SAVE_S = 1.0
"""Seconds before each save of a peer, in which the guest writes memory."""
COMPARED_EVERY_S = 0.05
"""Interval between the checkpoints of case `wrong`."""


def pause(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures guest-stopped time while the guest compiles: every policy and every peer in turn, at each size."""
    for index, (mib, wanted) in enumerate(plan.pauses_by_mib.items(), start=1):
        env.log(f"pause: starting a guest with {size(mib)}")
        with env.working(f"pause{mib}", mib, index, wanted.touch) as (guest, work):
            store = env.store("disk").fresh(guest.name)
            work.loop("compile")
            for round_number in range(wanted.rounds):
                env.log(f"pause: {size(mib)}: round {round_number + 1} of {wanted.rounds}")
                _measure_pauses(env, guest, store, wanted, round_number)
            store.remove()


def _measure_pauses(env: ProtectEnvironment, guest: Guest, store: Store, wanted: Pause, round_number: int) -> None:
    """Measures each policy, and after each a peer, so that both are spread over the round."""
    common = {
        "case": "pause",
        "memory_mib": guest.memory_mib,
        "workload": "compile",
        "store": "disk",
        "round": round_number,
    }
    peers = dict(wanted.saves)
    for how in POLICIES:
        count = ("--count", str(wanted.checkpoints + 1))
        with protected(env.rekindle, guest.name, store, span(PAUSE_EVERY_S), policy(how), *count) as protector:
            protector.wait("checkpoint", wanted.checkpoints + 1, timeout=60 + 30 * wanted.checkpoints)
            protector.join()
            env.checkpoints(protector, 1, **common, how=how, every_s=PAUSE_EVERY_S)
        if peers:
            peer, saves = peers.popitem()
            _save_by_peer(env, guest, peer, saves, common)
    for peer, saves in peers.items():
        _save_by_peer(env, guest, peer, saves, common)


def _save_by_peer(env: ProtectEnvironment, guest: Guest, how: str, saves: int, common: dict[str, Any]) -> None:
    """Saves a running guest in a peer's way, and appends the rows. `common`: their other columns."""
    path = env.disk_dir / f"{guest.name}.save"
    try:
        with env.qmp(guest) as qmp:
            for _ in range(saves):
                time.sleep(BEFORE_SAVE_S)
                saved = snapshot.save(qmp, how, path)
                env.rows.append(
                    Row(
                        what="save",
                        how=how,
                        stopped_us=saved.stopped_us,
                        stop_host_us=saved.stop_host_us,
                        took_us=saved.took_us,
                        bytes=saved.bytes,
                        **common,
                    )
                )
    finally:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Protection:
    """Checkpoints during a window."""

    store: Store
    every_s: float
    """Checkpoint interval."""
    how: str
    """The policy, as in `Row.how`."""


def _run_window(
    env: ProtectEnvironment,
    guest: Guest,
    work: Work,
    plan: Plan,
    workload: str,
    protection: Protection | None,
    case: str,
    round_number: int,
) -> None:
    """Runs a workload, protected or unprotected, and appends the rows of the window and its checkpoints."""
    row = Row(
        case=case,
        what="window",
        memory_mib=guest.memory_mib,
        workload=workload,
        store=protection.store.kind if protection else "",
        how=protection.how if protection else "none",
        round=round_number,
        every_s=protection.every_s if protection else None,
        checkpoints=0,
    )
    if protection is None:
        window = work.run(workload, plan.units.of(workload))
    else:
        window = _run_protected(env, guest, work, plan, protection, row)
    row.units, row.digest = window.count, window.digest
    row.window_us = int(window.ended * 1e6 - window.began * 1e6)
    env.rows.append(row)


def _run_protected(
    env: ProtectEnvironment, guest: Guest, work: Work, plan: Plan, protection: Protection, row: Row
) -> Window:
    """Runs the workload of `row` with checkpoints. Fills the row, and appends the rows of the checkpoints."""
    store, every_s, how = protection.store, protection.every_s, protection.how
    with protected(env.rekindle, guest.name, store, span(every_s), policy(how)) as protector:
        protector.wait("checkpoint", 2, timeout=60 + 10 * every_s)
        window = work.run(row.workload, plan.units.of(row.workload))
        used = protector.stop()
    begin_us, end_us = window.began * 1e6, window.ended * 1e6
    row.checkpoints = sum(begin_us <= event["stopped_host_us"] <= end_us for event in protector.of("checkpoint"))
    row.cpu_us, row.peak_kib = used.cpu_us or None, used.peak_kib or None
    env.checkpoints(
        protector,
        2,
        case=row.case,
        memory_mib=row.memory_mib,
        workload=row.workload,
        store=row.store,
        how=how,
        round=row.round,
        every_s=every_s,
    )
    detach(env.rekindle, guest.name, store, policy(how))
    return window


def intervals(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures table I, figures 2 and 3: size, commit, pause, overhead by interval, workload, policy and store."""
    with env.working("table", MEMORY_MIB, 10) as (guest, work):
        for round_number, (kind, workload, how) in enumerate(plan.cells):
            if not env.has_store(kind):
                continue
            store = env.store(kind).fresh(f"table-{workload}-{how}")
            work.run(workload, plan.units.of(workload))  # fills the guest's page cache with all files of the workload
            _run_window(env, guest, work, plan, workload, None, "intervals", round_number)
            for every_s in plan.intervals_s:
                env.log(f"intervals: {workload}, {how}, {kind}, every {every_s:g} s")
                protection = Protection(store, every_s, how)
                _run_window(env, guest, work, plan, workload, protection, "intervals", round_number)
            _run_window(env, guest, work, plan, workload, None, "intervals", round_number)
            store.remove()
    env.end_object_store()


def slowdown(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures the same work with a checkpoint every 2 s and without protection, by turns: A B, B A, A B, ..."""
    with env.working("slow", MEMORY_MIB, 11) as (guest, work):
        for workload, pairs in plan.pairs_by_workload.items():
            store = env.store("disk").fresh(f"slowdown-{workload}")
            work.run(workload, plan.units.of(workload))  # fills the guest's page cache with all files of the workload
            for round_number in range(pairs):
                env.log(f"slowdown: {workload}: pair {round_number + 1} of {pairs}")
                turns = [None, Protection(store, 2.0, DEFAULT)]
                for protection in turns if round_number % 2 == 0 else turns[::-1]:
                    _run_window(env, guest, work, plan, workload, protection, "slowdown", round_number)
            store.remove()


def rates(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures guests that write memory at a set rate, and an idle guest: every policy, a checkpoint per second."""
    with env.working("rates", MEMORY_MIB, 12) as (guest, _):
        area = max(area for _, area in plan.rates)
        guest.command(f"touch {max(1, int(area))}M")
        for round_number, (rate, area) in enumerate(plan.rates):
            guest.command(f"dirty {rate:g} {area:g} random" if rate else "dirty 0")
            for how in POLICIES:
                env.log(f"rates: {rate:g} MB/s over {area:g} MB, {how}")
                store = env.store("disk").fresh("rates")
                count = ("--count", str(plan.rate_checkpoints + 1))
                with protected(env.rekindle, guest.name, store, "1s", policy(how), *count) as protector:
                    protector.wait("checkpoint", plan.rate_checkpoints + 1)
                    protector.join()
                    env.checkpoints(
                        protector,
                        1,
                        case="rates",
                        memory_mib=MEMORY_MIB,
                        workload="dirty" if rate else "idle",
                        store="disk",
                        how=how,
                        round=round_number,
                        every_s=1.0,
                        rate_mb=rate,
                    )
                store.remove()


def commit(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures a checkpoint of 46 MB of incompressible data, by turns with dd of as many bytes to the same disk."""
    source, target = env.work / "dd.source", env.disk_dir / "dd.target"
    with env.working("commit", MEMORY_MIB, 13) as (guest, _):
        store = env.store("disk").fresh("commit")
        common = {"case": "commit", "memory_mib": MEMORY_MIB, "workload": "dirty", "store": "disk"}
        first_commit(env.rekindle, guest, store)
        try:
            for round_number in range(plan.commits):
                env.log(f"commit: turn {round_number + 1} of {plan.commits}")
                length = _commit_rewritten(env, guest, store, round_number, common)
                if not source.exists():
                    source.write_bytes(os.urandom(length))
                us, length = dd(source, target, length)
                env.rows.append(Row(what="dd", how="dd", round=round_number, took_us=us, bytes=length, **common))
        finally:
            source.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            store.remove()


def _commit_rewritten(
    env: ProtectEnvironment, guest: Guest, store: Store, round_number: int, common: dict[str, Any]
) -> int:
    """Makes the guest write 46 MB, takes a checkpoint, and appends its row. Returns the bytes of the checkpoint."""
    protector = commit_rewritten(env.rekindle, guest, store)
    env.checkpoints(protector, 0, **common, how=DEFAULT, round=round_number)
    return int(protector.of("checkpoint")[0]["bytes"])


def encryption(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures checkpoints of 46 MB with and without encryption, by turns: two equal guests, a store for each."""
    with ExitStack() as closing:
        guests: dict[str, tuple[Guest, Store]] = {}
        for index, kind in enumerate((PLAIN, ENCRYPTED), start=15):
            guest, _ = closing.enter_context(env.working(kind, MEMORY_MIB, index))
            guests[kind] = guest, env.store(kind).fresh(kind)
            first_commit(env.rekindle, *guests[kind])
        for round_number in range(plan.encrypted_commits):
            env.log(f"encryption: turn {round_number + 1} of {plan.encrypted_commits}")
            turns = (PLAIN, ENCRYPTED)
            for kind in turns if round_number % 2 == 0 else turns[::-1]:
                common = {"case": "encryption", "memory_mib": MEMORY_MIB, "workload": "dirty", "store": kind}
                _commit_rewritten(env, *guests[kind], round_number, common)
        for _, store in guests.values():
            store.remove()


def dd(source: Path, target: Path, length: int) -> tuple[int, int]:
    """Writes `length` bytes of `source` to `target` by `dd conv=fdatasync`.

    Returns microseconds and bytes as dd reports them.
    """
    target.unlink(missing_ok=True)
    command = ["dd", f"if={source}", f"of={target}", "bs=1M", f"count={length}", "iflag=count_bytes", "conv=fdatasync"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    report = re.search(r"(\d+) bytes .* copied, ([\d.e+-]+) s", result.stderr)
    if report is None:
        raise RuntimeError(f"dd: {result.stderr.strip()}")
    return int(float(report[2]) * 1e6), int(report[1])


def wrong(env: ProtectEnvironment, plan: Plan) -> None:
    """Takes many checkpoints of a guest that compiles and writes; compares all memory with the newest checkpoint."""
    with env.working("wrong", MEMORY_MIB, 14) as (guest, work):
        guest.command("touch 64M")
        guest.command("dirty 20 64 random")
        work.loop("compile")
        for round_number, how in enumerate(POLICIES if plan.budget_s is None else (DEFAULT,)):
            # The default policy takes all of the checkpoints; each of the others takes a tenth.
            count = plan.compared_checkpoints if how == DEFAULT else max(1, plan.compared_checkpoints // 10)
            env.log(f"wrong: {count} checkpoints, {how}")
            store = env.store("disk").fresh(f"wrong-{how}")
            options = ("--keep", "1", "--count", str(count), "--compare")
            with protected(env.rekindle, guest.name, store, span(COMPARED_EVERY_S), policy(how), *options) as protector:
                compared = protector.wait("compared", timeout=120 + 3.0 * count)[0]
                protector.join()
            row = _comparison_row(how, round_number, compared)
            row.checkpoints = len(protector.of("checkpoint"))
            env.rows.append(row)
            store.remove()


def _comparison_row(how: str, round_number: int, compared: dict[str, Any]) -> Row:
    """Returns the row of a comparison. `compared`: the protector's event."""
    return Row(
        case="wrong",
        what="compare",
        memory_mib=MEMORY_MIB,
        workload="compile",
        store="disk",
        how=how,
        round=round_number,
        every_s=COMPARED_EVERY_S,
        stopped_us=compared["stopped_us"],
        pages=compared["pages"],
        written_since=compared["written_since"],
        wrong=compared["wrong"],
        named=", ".join(compared["named"]),
    )


CASES: dict[str, Callable[[ProtectEnvironment, Plan], None]] = {
    "pause": pause,
    "commit": commit,
    "encryption": encryption,
    "wrong": wrong,
    "slowdown": slowdown,
    "intervals": intervals,
    "rates": rates,
}
