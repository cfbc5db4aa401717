"""The cases of checkpoints, listed in `CASES` at the end.

Each sets up a guest, measures Rekindle and the peers by turns, and appends rows for the analysis. The peers are QEMU's
own saves of a running guest (`rekindle_lab.peers.snapshot`). A *window* is a piece of work in the guest: it compiles or
transcodes, with or without checkpoints meanwhile.
"""

import math
import os
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rekindle_bench.environment import MIB
from rekindle_lab.guests import Guest, size
from rekindle_lab.peers import snapshot
from rekindle_lab.protector import ResourceUse, detach, protected
from rekindle_lab.stores import Store
from rekindle_lab.work import Window, Work

from .plan import Pause, Plan
from .rows import DEFAULT, POLICIES, Row
from .working_guests import ProtectEnvironment, policy, span

MEMORY_MIB = 512
"""RAM of the paper's guest."""
PAUSE_EVERY_S = 2.0
"""Interval between the checkpoints of case `pause`."""
GAP_S = 1.0
"""Seconds between two saves of a peer, so that the guest writes memory before the next save."""
COMMIT_BYTES = 46_000_000
"""Table I: size of a checkpoint of the kernel compilation every 10 s."""
PAGE_BYTES = 4096
WRONG_EVERY_S = 0.05
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
                _round(env, guest, store, wanted, round_number)
            store.remove()


def _round(env: ProtectEnvironment, guest: Guest, store: Store, wanted: Pause, round_number: int) -> None:
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
            _peer(env, guest, peer, saves, common)
    for peer, saves in peers.items():
        _peer(env, guest, peer, saves, common)


def _peer(env: ProtectEnvironment, guest: Guest, how: str, saves: int, common: dict[str, Any]) -> None:
    """Saves a running guest in a peer's way, and appends the rows. `common`: their other columns."""
    path = env.disk_dir / f"{guest.name}.save"
    try:
        with env.qmp(guest) as qmp:
            for _ in range(saves):
                time.sleep(GAP_S)  # gives the guest time to write memory
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


def _window(
    env: ProtectEnvironment,
    guest: Guest,
    work: Work,
    store: Store | None,
    plan: Plan,
    workload: str,
    every_s: float | None,
    how: str,
    **common: Any,  # noqa: ANN401
) -> Window:
    """Runs a workload, protected or (without a store) unprotected, and appends the rows. `common`: more columns."""
    used = ResourceUse(0, 0)
    protection = (
        nullcontext(None)
        if store is None or every_s is None
        else protected(env.rekindle, guest.name, store, span(every_s), policy(how))
    )
    with protection as protector:
        if protector is not None:
            protector.wait("checkpoint", 2, timeout=60 + 10 * (every_s or 0))
        window = work.run(workload, plan.units.of(workload))
        if protector is not None:
            used = protector.stop()
    kind = store.kind if store else ""
    common |= {"memory_mib": guest.memory_mib, "workload": workload, "store": kind, "how": how, "every_s": every_s}
    begin_us, end_us = window.began * 1e6, window.ended * 1e6
    checkpoints = 0
    if protector is not None and store is not None:
        checkpoints = sum(begin_us <= event["stopped_host_us"] <= end_us for event in protector.of("checkpoint"))
        env.checkpoints(protector, 2, **common)
        detach(env.rekindle, guest.name, store, policy(how))
    env.rows.append(
        Row(
            what="window",
            units=window.count,
            window_us=int(end_us - begin_us),
            checkpoints=checkpoints,
            cpu_us=used.cpu_us or None,
            peak_kib=used.peak_kib or None,
            digest=window.digest,
            **common,
        )
    )
    return window


def intervals(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures table I, figures 2 and 3: size, commit, pause, overhead by interval, workload, policy and store."""
    with env.working("table", MEMORY_MIB, 10) as (guest, work):
        for round_number, (kind, workload, how) in enumerate(plan.cells):
            if not env.has_store(kind):
                continue
            store = env.store(kind).fresh(f"table-{workload}-{how}")
            common = {"case": "intervals", "round": round_number}
            work.run(workload, plan.units.of(workload))  # fills the guest's page cache with all files of the workload
            _window(env, guest, work, None, plan, workload, None, "none", **common)
            for every_s in plan.intervals_s:
                env.log(f"intervals: {workload}, {how}, {kind}, every {every_s:g} s")
                _window(env, guest, work, store, plan, workload, every_s, how, **common)
            _window(env, guest, work, None, plan, workload, None, "none", **common)
            store.remove()


def slowdown(env: ProtectEnvironment, plan: Plan) -> None:
    """Measures the same work with a checkpoint every 2 s and without protection, by turns: A B, B A, A B, ..."""
    with env.working("slow", MEMORY_MIB, 11) as (guest, work):
        for workload, pairs in plan.pairs_by_workload.items():
            store = env.store("disk").fresh(f"slowdown-{workload}")
            work.run(workload, plan.units.of(workload))  # fills the guest's page cache with all files of the workload
            for round_number in range(pairs):
                env.log(f"slowdown: {workload}: pair {round_number + 1} of {pairs}")
                turns = [(None, None, "none"), (store, 2.0, DEFAULT)]
                for store_used, every_s, how in turns if round_number % 2 == 0 else turns[::-1]:
                    common = {"case": "slowdown", "round": round_number}
                    _window(env, guest, work, store_used, plan, workload, every_s, how, **common)
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
    pages = math.ceil(COMMIT_BYTES / PAGE_BYTES)
    area_mib = math.ceil(pages * PAGE_BYTES / MIB)
    source, target = env.work / "dd.source", env.disk_dir / "dd.target"
    with env.working("commit", MEMORY_MIB, 13) as (guest, _):
        store = env.store("disk").fresh("commit")
        guest.command(f"touch {area_mib}M")
        common = {"case": "commit", "memory_mib": MEMORY_MIB, "workload": "dirty", "store": "disk"}
        with protected(env.rekindle, guest.name, store, "1h") as protector:
            protector.stop()
        try:
            for round_number in range(plan.commits):
                env.log(f"commit: turn {round_number + 1} of {plan.commits}")
                _rewrite(guest, area_mib)
                # QEMU's write record covers the rewrite: the next protector's first checkpoint has the area alone.
                with protected(env.rekindle, guest.name, store, "1h") as protector:
                    event = protector.of("checkpoint")[0]
                    protector.stop()
                    if event["full"]:
                        raise RuntimeError("the protector did not continue from the last one's checkpoint")
                    env.checkpoints(protector, 0, **common, how=DEFAULT, round=round_number)
                if not source.exists():
                    source.write_bytes(os.urandom(event["bytes"]))
                us, length = dd(source, target, event["bytes"])
                env.rows.append(Row(what="dd", how="dd", round=round_number, took_us=us, bytes=length, **common))
        finally:
            source.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            store.remove()


def _rewrite(guest: Guest, area_mib: int) -> None:
    """Makes the guest write the whole touched area again."""

    def written_pages() -> int:
        """Lets the guest write 400 MB/s, and returns how many pages it has written so far."""
        return int(guest.command("dirty 400").split()[1])

    first = written_pages()
    deadline = time.monotonic() + 120.0
    while written_pages() - first < area_mib * MIB // PAGE_BYTES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{guest.name}: has not written {area_mib} MiB within 120 s")
        time.sleep(0.05)
    guest.command("dirty 0")


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
            with protected(env.rekindle, guest.name, store, span(WRONG_EVERY_S), policy(how), *options) as protector:
                compared = protector.wait("compared", timeout=120 + 3.0 * count)[0]
                protector.join()
                env.rows.append(
                    Row(
                        case="wrong",
                        what="compare",
                        memory_mib=MEMORY_MIB,
                        workload="compile",
                        store="disk",
                        how=how,
                        round=round_number,
                        every_s=WRONG_EVERY_S,
                        checkpoints=len(protector.of("checkpoint")),
                        stopped_us=compared["stopped_us"],
                        pages=compared["pages"],
                        written_since=compared["written_since"],
                        wrong=compared["wrong"],
                        named=", ".join(compared["named"]),
                    )
                )
            store.remove()


CASES: dict[str, Callable[[ProtectEnvironment, Plan], None]] = {
    "pause": pause,
    "commit": commit,
    "wrong": wrong,
    "slowdown": slowdown,
    "intervals": intervals,
    "rates": rates,
}
