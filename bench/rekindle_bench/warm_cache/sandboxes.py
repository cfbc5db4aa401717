"""The case of the figures `speed_kept_*`: what confined disk servers and pagers and QEMU's system call filter cost.

Two equal guests, a *pair*, are measured by turns: one with all sandboxes (`on`), and one without any (`off`).
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle_bench.protect.rewritten import commit_rewritten, first_commit
from rekindle_bench.restore.crashed_guests import Restored, RestoreEnvironment
from rekindle_bench.vmm.twins import by_name
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.runs.processes import with_variable
from rekindle_lab.stores import Store

from .cache_guests import BLOCK_BYTES, CacheEnvironment, CacheGuest
from .file_access import fio
from .plan import Plan
from .rows import SANDBOXES_OFF, SANDBOXES_ON, Row
from .ways import turns

MEMORY_MIB = 512
ACCESSES = {"disk": ("randread", 16, ("--direct=1",)), "disk-write": ("randwrite", 2, ("--direct=1", "--fdatasync=1"))}
"""Accesses of 4 KiB at random by `Row.what`: mode, MiB and options of fio. Each write is followed by a flush."""
PAGER_POLL_S = 0.02
"""Seconds between two searches for the pager."""
_FILTERS = re.compile(r"^Seccomp_filters:\s+(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Side:
    """One guest of a pair, and what is needed to measure it."""

    how: str
    """`SANDBOXES_ON` or `SANDBOXES_OFF`."""
    env: RestoreEnvironment
    """Its host configuration turns the confinement of disk servers and pagers on or off."""
    guest: CacheGuest
    store: Store

    def append(self, what: str, round_number: int, us: int, **columns: Any) -> None:  # noqa: ANN401
        """Appends a row. `columns`: further columns."""
        row = Row(
            case="sandboxes",
            what=what,
            how=self.how,
            limit="none",
            round=round_number,
            memory_mib=self.guest.memory_mib,
            us=us,
            **columns,
        )
        self.env.rows.append(row)

    def crash_and_restore(self) -> Restored:
        """Ends the guest as its host would, and restores it from its store, which is read from the disk."""
        self.env.crash(self.guest.name)
        self.store.forget()
        return self.env.restore(self.guest.name, self.store)


def _environment(env: CacheEnvironment, closing: ExitStack, how: str) -> RestoreEnvironment:
    """Returns the environment of one guest of a pair. `closing`: closes its stores."""
    config = env.work / f"host-{how}.toml"
    config.write_text("" if how == SANDBOXES_ON else 'confine_helpers = false\nqemu_own_user = "off"\n')
    rekindle = replace(env.rekindle, config=config)
    return RestoreEnvironment(env.root, rekindle, env.qemu, env.rows, env.space, closing, began=env.began)


def _start(env: CacheEnvironment, closing: ExitStack, how: str, pair: int, index: int) -> Side:
    """Starts a guest of the pair with a number; `closing` stops it. `index`: see `Guest`."""
    env_of_side = _environment(env, closing, how)
    # Each pair has names of its own, since the log of a disk is not removed with the guest.
    guest = env.cached(f"pair{pair}-{how}", MEMORY_MIB, index)
    guest = replace(guest, sandboxed=how == SANDBOXES_ON, disk_dir=env.disk_dir)
    closing.enter_context(env_of_side.ours(guest))
    store = env_of_side.store("disk").fresh(guest.name)
    closing.callback(store.remove)
    return Side(how, env_of_side, guest, store)


def _filters(pid: int | str) -> int | None:
    """Returns the number of a process's system call filters; `None` if the process has ended."""
    try:
        found = _FILTERS.search(Path(f"/proc/{pid}/status").read_text())
    except FileNotFoundError:
        return None
    if found is None:
        raise RekindleError("this kernel does not report system call filters: it needs Linux 5.9")
    return int(found[1])


def _pagers(side: Side) -> list[int]:
    """Returns the pagers of a guest, without their brokers."""
    pids = with_variable("REKINDLE_RUN_DIR", str(side.env.rekindle.run_dir))
    ending = f"\0{side.guest.name}\0".encode()
    found = []
    for pid in pids:
        with suppress(OSError):  # the process has ended
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"\0pager\0" in line and line.endswith(ending):
                found.append(pid)
    return found


def _require_side(side: Side, name: str, filters: int | None) -> None:
    """Raises unless a process with this number of filters belongs to the side. `None`: the process has ended."""
    inherited = _filters("self")  # this process may have filters, too, which its children inherit
    if filters is not None and inherited is not None and (filters > inherited) != side.guest.sandboxed:
        raise RekindleError(f"{side.guest.name}: {name} has {filters - inherited} system call filters")


def check(side: Side) -> None:
    """Raises unless the QEMU and the disk server of a guest have filters or none, as its side must."""
    shown = side.env.rekindle.show(side.guest.name)
    server = next((helper["pid"] for helper in shown["helpers"] if helper["helper"] == "disk:disk0"), None)
    if server is None:
        raise RekindleError(f"{side.guest.name}: the server of its disk is missing: {shown['helpers']}")
    _require_side(side, "QEMU", _filters(shown["vmm"]["pid"]))
    _require_side(side, "the disk server", _filters(server))


def _checked_restore(side: Side) -> None:
    """Restores a guest without measuring it, and checks all of its processes, also its pager."""
    counts: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        restore = pool.submit(side.crash_and_restore)
        while not restore.done():
            counts += [count for pid in _pagers(side) if (count := _filters(pid)) is not None]
            time.sleep(PAGER_POLL_S)
        side.env.wait_filled(side.guest.name, restore.result().resumed_host_us)
    if not counts:
        raise RekindleError(f"{side.guest.name}: no pager was seen during its restore")
    _require_side(side, "the pager", max(counts))  # it has its filter only some time after its start
    check(side)


def _reboot_vmm(side: Side, round_number: int) -> None:
    """Replaces the QEMU; the row has the guest-stopped time."""
    document = side.env.rekindle.reboot([side.guest.name], "warm")
    (vm,) = by_name(document, [side.guest.name])
    side.append("vmm", round_number, vm["stopped_us"], steps=vm["steps"])


def _access_disk(side: Side, round_number: int) -> None:
    """Makes the guest read and write its disk without its page cache; the rows have the duration of all requests."""
    for what, (mode, mib, options) in ACCESSES.items():
        moved_bytes, duration_us = fio(side.guest, mode, BLOCK_BYTES, mib, *options)
        requests = moved_bytes // BLOCK_BYTES
        side.append(what, round_number, duration_us, block=BLOCK_BYTES, bytes=moved_bytes, requests=requests)


def _checkpoint(side: Side, round_number: int) -> None:
    """Takes a checkpoint of 46 MB; the rows have its guest-stopped time, and its duration with the commit."""
    (event,) = commit_rewritten(side.env.rekindle, side.guest, side.store).of("checkpoint")
    steps = [{"step": name, "us": us} for name, us in event["steps"].items()]
    side.append("protect", round_number, event["stopped_us"], steps=steps)
    side.append("protect-commit", round_number, event["took_us"], bytes=event["bytes"])


def _restore(side: Side, round_number: int) -> None:
    """Restores the guest on demand; the rows have the time until it runs, and from then until all memory is loaded."""
    restored = side.crash_and_restore()
    filled = side.env.wait_filled(side.guest.name, restored.resumed_host_us)
    side.append("restore", round_number, restored.restore_us, steps=restored.steps)
    side.append("fill", round_number, filled.fill_us)


@dataclass(frozen=True)
class Pair:
    """Two equal guests that are measured by turns."""

    number: int
    """Number of the pair, from 0."""
    sides: dict[str, Side]
    """By `Side.how`."""
    rounds: dict[str, int]
    """As `Plan.sandbox_rounds`."""

    def by_turns(self, what: str, measure: Callable[[Side, int], None]) -> None:
        """Measures one thing on both sides: A B, B A, A B. `what`: a key of `rounds`."""
        for index in range(self.rounds[what]):
            round_number = self.number * self.rounds[what] + index
            for how in turns(index, tuple(self.sides)):
                measure(self.sides[how], round_number)


def sandboxes(env: CacheEnvironment, plan: Plan) -> None:
    """Measures pairs of guests, since also equal guests differ a little for as long as they run."""
    env.need(memory_mib=3 * MEMORY_MIB, disk_mib=8192)
    for number in range(plan.sandbox_pairs):
        with ExitStack() as closing:
            # The one that is started first is measured first.
            hows = turns(number, (SANDBOXES_ON, SANDBOXES_OFF))
            sides = {how: _start(env, closing, how, number, index) for index, how in enumerate(hows, start=9)}
            _measure(env, Pair(number, sides, plan.sandbox_rounds))
        env.log(f"sandboxes: pair {number + 1} of {plan.sandbox_pairs}")


def _measure(env: CacheEnvironment, pair: Pair) -> None:
    """Measures reboots of the VMM, a disk, checkpoints and restores."""
    for side in pair.sides.values():
        check(side)
    env.log("sandboxes: reboots of the VMM")
    pair.by_turns("vmm", _reboot_vmm)
    env.log("sandboxes: accesses to the disk")
    pair.by_turns("disk", _access_disk)
    env.log("sandboxes: checkpoints")
    for side in pair.sides.values():
        first_commit(side.env.rekindle, side.guest, side.store)
    pair.by_turns("protect", _checkpoint)
    env.log("sandboxes: restores")
    for side in pair.sides.values():
        _checked_restore(side)
    pair.by_turns("restore", _restore)
