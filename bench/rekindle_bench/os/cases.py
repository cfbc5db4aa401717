"""The cases of OS reboots. Each appends its rows immediately and takes the ways by turns (A B C D, A B C D)."""

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

INDEXES = {"micro": 10, "debian": 20, "immutable": 30}
"""Prefix of the guests' networks."""
LEAK_INDEX = 40
LOSSES = 3
"""A case stops after this many reboots that left a guest unusable."""


def guests_by_way(
    env: OsEnvironment, stack: ExitStack, kind: str, index: int, memory_mib: int, image: Image | None = None
) -> Callable[[str], OsGuest]:
    """Starts two guests of a kind, one of which keeps phases; returns a function from a way to the guest for it."""
    plain = stack.enter_context(env.ours(env.os_guest(kind, index, memory_mib, image)))
    keeps = stack.enter_context(env.ours(env.os_guest(kind, index + 1, memory_mib, image, phases=True)))
    assert isinstance(plain, OsGuest) and isinstance(keeps, OsGuest)
    env.wait_saved(keeps)
    return lambda how: keeps if how.startswith("phase-") else plain


def reboots(kind: str) -> Callable[[OsEnvironment, Plan], None]:
    """Returns the case of one kind of guest."""

    def case(env: OsEnvironment, plan: Plan) -> None:
        rounds = plan.rounds.get(kind, 0)
        if not rounds:
            raise NotPlannedError
        with ExitStack() as stack:
            guest_of, losses = guests_by_way(env, stack, kind, INDEXES[kind], plan.memory_mib), 0
            for number, how in itertools.product(range(rounds), GUESTS[kind]):
                try:
                    row = env.reboot(guest_of(how), how, number)
                except RekindleError as error:
                    losses += 1
                    if losses > LOSSES:
                        raise
                    env.record_loss(guest_of(how), f"{kind}: {number + 1} of {rounds}: {how}: {error}")
                    continue
                env.rows.append(row)
                gap = (row.gap_us or 0) / 1e6
                env.log(f"{kind}: {number + 1} of {rounds}: {how}: {gap:.2f} s without an answer")

    case.__doc__ = f"{kind}: every way that it has."
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
            for number in range(rounds):
                for how in ways:
                    guest: Leaky = leaky(guest_of(how), module)
                    env.reboot(guest.guest, how, number)
                    before = guest.memory()
                    asked = guest.leak(plan.leak_mib)
                    leaked = guest.memory()
                    row = env.reboot(guest.guest, how, number, "leak")
                    after = guest.memory()
                    row.leaked_bytes = asked
                    row.slab_before_kib, row.available_before_kib = before.slab_kib, before.available_kib
                    row.slab_leaked_kib, row.available_leaked_kib = leaked.slab_kib, leaked.available_kib
                    row.slab_after_kib, row.available_after_kib = after.slab_kib, after.available_kib
                    env.rows.append(row)
                    back = leaked.slab_kib - after.slab_kib
                    env.log(f"leak: {kind}: {number + 1} of {rounds}: {how}: {back} KiB of {asked >> 10} are back")


CASES: dict[str, Callable[[OsEnvironment, Plan], None]] = {
    "micro": reboots("micro"),
    "leak": leak,
    "peers": peers.peers,
    "immutable": reboots("immutable"),
    "debian": reboots("debian"),
}
