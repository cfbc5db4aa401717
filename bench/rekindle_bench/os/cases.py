"""The cases of OS reboots, listed in `CASES` at the end.

Each appends its rows immediately and takes the ways by turns (A B C D, A B C D). Each needs two guests: one that saves
*phases* (boot snapshots) for the ways that resume from them, and a plain one for the other ways.
"""

import itertools
from collections.abc import Callable
from contextlib import ExitStack

from rekindle_bench.case import NotPlannedError
from rekindle_lab.guests import Image
from rekindle_lab.leak import Leaky, leak_image, leaky
from rekindle_lab.os_guest import OsGuest
from rekindle_lab.rekindle import RekindleError

from . import peers
from .plan import GUESTS, LEAKS, Plan
from .rebooted_guests import OsEnvironment
from .rows import Row

INDEXES = {"micro": 10, "debian": 20, "immutable": 30}
"""First network of each kind of guest: `Guest.index`."""
LEAK_INDEX = 40
"""First network of the guests of case `leak`; two for each kind."""
TOLERATED_LOSSES = 3
"""Reboots of a case that may leave a guest unusable. Each such guest is booted again; one more ends the case."""


def guests_by_way(
    env: OsEnvironment, stack: ExitStack, kind: str, index: int, memory_mib: int, image: Image | None = None
) -> Callable[[str], OsGuest]:
    """Starts two guests of a kind, one of which saves phases; returns a function from a way to the guest for it."""
    plain = stack.enter_context(env.ours(env.os_guest(kind, index, memory_mib, image)))
    keeps_phases = stack.enter_context(env.ours(env.os_guest(kind, index + 1, memory_mib, image, phases=True)))
    env.wait_saved(keeps_phases)
    return lambda how: keeps_phases if how.startswith("phase-") else plain


def reboots(kind: str) -> Callable[[OsEnvironment, Plan], None]:
    """Returns the case of one kind of guest: reboots in every way that it has."""

    def case(env: OsEnvironment, plan: Plan) -> None:
        rounds = plan.rounds.get(kind, 0)
        if not rounds:
            raise NotPlannedError
        with ExitStack() as stack:
            guest_of, losses = guests_by_way(env, stack, kind, INDEXES[kind], plan.memory_mib), 0
            for round_number, how in itertools.product(range(rounds), GUESTS[kind]):
                try:
                    row = env.reboot(guest_of(how), how, round_number)
                except RekindleError as error:
                    losses += 1
                    if losses > TOLERATED_LOSSES:
                        raise
                    env.record_loss(guest_of(how), f"{kind}: {round_number + 1} of {rounds}: {how}: {error}")
                    continue
                env.rows.append(row)
                gap_s = (row.gap_us or 0) / 1e6
                env.log(f"{kind}: {round_number + 1} of {rounds}: {how}: {gap_s:.2f} s without an answer")

    return case


def leak(env: OsEnvironment, plan: Plan) -> None:
    """Leaks kernel memory, then reboots the guest in each way, and records how much memory is recovered.

    Each guest is also rebooted in the same way before the leak, since the way to boot affects a kernel's allocations.
    """
    if not any(plan.leaks.values()):
        raise NotPlannedError
    module = leak_image(env.root)
    for kind, ways in LEAKS.items():
        rounds = plan.leaks.get(kind, 0)
        if not rounds:
            continue
        with ExitStack() as stack:
            image = Image("micro", module) if kind == "micro" else None
            index = LEAK_INDEX + (0 if kind == "micro" else 2)
            guest_of = guests_by_way(env, stack, kind, index, plan.memory_mib, image)
            for round_number, how in itertools.product(range(rounds), ways):
                row = leak_and_reboot(env, leaky(guest_of(how), module), how, round_number, plan.leak_mib)
                env.rows.append(row)
                freed_kib = (row.slab_leaked_kib or 0) - (row.slab_after_kib or 0)
                leaked_kib = (row.leaked_bytes or 0) >> 10
                progress = f"leak: {kind}: {round_number + 1} of {rounds}: {how}"
                env.log(f"{progress}: {freed_kib} KiB of {leaked_kib} are back")


def leak_and_reboot(env: OsEnvironment, guest: Leaky, how: str, round_number: int, leak_mib: int) -> Row:
    """Reboots twice, with a leak in between; returns the row of the second reboot."""
    env.reboot(guest.guest, how, round_number)
    before = guest.memory()
    leaked_bytes = guest.leak(leak_mib)
    leaked = guest.memory()
    row = env.reboot(guest.guest, how, round_number, "leak")
    after = guest.memory()
    row.leaked_bytes = leaked_bytes
    row.slab_before_kib, row.available_before_kib = before.slab_kib, before.available_kib
    row.slab_leaked_kib, row.available_leaked_kib = leaked.slab_kib, leaked.available_kib
    row.slab_after_kib, row.available_after_kib = after.slab_kib, after.available_kib
    return row


CASES: dict[str, Callable[[OsEnvironment, Plan], None]] = {
    "micro": reboots("micro"),
    "leak": leak,
    "peers": peers.peers,
    "immutable": reboots("immutable"),
    "debian": reboots("debian"),
}
