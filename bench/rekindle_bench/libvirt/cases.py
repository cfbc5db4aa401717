"""The cases of libvirt domains, listed in `CASES` at the end.

Each starts its domains, replaces or protects them in each way by turns (A B A B), and appends rows for the analysis.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext

from rekindle_bench.case import NoRoomError
from rekindle_lab.guests import Guest, size
from rekindle_lab.protector import protected
from rekindle_lab.rekindle import Rekindle

from .domains import IMAGE, LOAD_MB, Domain, LibvirtEnvironment, absences_us, loaded, replaced, reported_away_us, timed
from .losses import losses
from .operations import works
from .overlays import epochs, overlays
from .plan import Checkpoints, Plan
from .restored import restored
from .rows import AGAIN, ATTACHED, FIRST, MANAGEDSAVE, OWN, REPLACED, Row

EVERY = "1s"
"""Interval between the checkpoints of case `pause`."""


def row_of(case: str, how: str, guest: Guest, round_number: int, guests: int = 1) -> Row:
    """Returns the row of a guest, without measurements."""
    return Row(case=case, how=how, memory_mib=guest.memory_mib, guests=guests, round=round_number, vm=guest.name)


def replace(env: LibvirtEnvironment, case: str, how: str, domain: Domain, round_number: int) -> None:
    """Replaces the QEMU of a domain by Rekindle, and appends the row."""
    env.measure(row_of(case, how, domain, round_number), domain, lambda: env.replace([domain.name]))


def by_size(
    env: LibvirtEnvironment, case: str, rounds_by_mib: dict[int, int], copies: int, act: Callable[[int, int], None]
) -> None:
    """Calls `act` with each size and its number of rounds, if the machine has memory for `copies` times the size."""
    for mib, rounds in rounds_by_mib.items():
        try:
            env.need(memory_mib=copies * mib)
        except NoRoomError as error:
            env.left_out.append(f"{case} with {size(mib)}: all of it, for the machine {error}")
            continue
        act(mib, rounds)


def first(env: LibvirtEnvironment, plan: Plan) -> None:
    """Replaces the QEMU of domains for the first time, each of them freshly started."""

    def of_size(mib: int, rounds: int) -> None:
        for round_number in range(rounds):
            env.log(f"first: {size(mib)}: round {round_number + 1} of {rounds}")
            with env.running(env.domain("first", mib, 1)) as domain:
                replace(env, "first", FIRST, domain, round_number)

    by_size(env, "first", plan.firsts, 2, of_size)


def again(env: LibvirtEnvironment, plan: Plan) -> None:
    """Replaces the QEMU of a domain again and again, in turn with that of a VM of Rekindle's of the same size."""

    def of_size(mib: int, rounds: int) -> None:
        env.log(f"again: starting a domain and a VM of {size(mib)}")
        with env.running(env.domain("again", mib, 2)) as domain:
            replace(env, "again", FIRST, domain, 0)
            with env.ours(env.guest("own", IMAGE, mib, 2, "all")) as own:
                for round_number in range(rounds):
                    env.log(f"again: {size(mib)}: round {round_number + 1} of {rounds}")
                    replace(env, "again", AGAIN, domain, round_number)
                    row = row_of("again", OWN, own, round_number)
                    env.measure(row, own, lambda: env.rekindle.reboot([own.name], "warm"))

    by_size(env, "again", plan.agains, 2, of_size)


def managedsave(env: LibvirtEnvironment, plan: Plan) -> None:
    """Replaces the QEMU of a domain, in turn with libvirt's way, after which the domain's RAM is private again."""

    def of_size(mib: int, rounds: int) -> None:
        env.need(disk_mib=mib)
        env.log(f"managedsave: starting a domain of {size(mib)}")
        with env.running(env.domain("saved", mib, 3)) as domain:
            for round_number in range(rounds):
                env.log(f"managedsave: {size(mib)}: round {round_number + 1} of {rounds}")
                replace(env, "managedsave", FIRST, domain, round_number)
                row = row_of("managedsave", MANAGEDSAVE, domain, round_number)
                env.measure(row, domain, lambda: env.managedsave(domain.name))

    by_size(env, "managedsave", plan.saves, 2, of_size)


def away(env: LibvirtEnvironment, plan: Plan) -> None:
    """Replaces the QEMUs of many domains by one command, with a client at libvirt."""
    count, mib = plan.away_domains, plan.away_mib
    env.need(memory_mib=2 * count * mib)
    with ExitStack() as stack:
        env.log(f"away: starting {count} domains of {size(mib)}")
        domains = [env.domain(f"away{number}", mib, 10 + number) for number in range(count)]
        for domain in domains:
            stack.enter_context(env.running(domain, wait=False))
        for domain in domains:
            domain.wait_ready()
        for round_number in range(plan.away_rounds):
            env.log(f"away: round {round_number + 1} of {plan.away_rounds}")
            with env.libvirt.polled() as polls:
                document, command_us = timed(lambda: env.replace([domain.name for domain in domains]))
            absences = absences_us(polls.attempts)
            for domain in domains:
                domain.wait_ready()
                row = row_of("away", AGAIN if round_number else FIRST, domain, round_number, count)
                replaced(row, document)
                row.command_us, row.polls, row.absences = command_us, len(polls.attempts), len(absences)
                row.away_us, row.longest_away_us = sum(absences), max(absences, default=0)
                row.reported_away_us = reported_away_us(document)
                env.rows.append(row)


def pause(env: LibvirtEnvironment, plan: Plan) -> None:
    """Protects an attached domain, one that was replaced before, and a VM of Rekindle's, by turns."""
    for mib, wanted in plan.pauses.items():
        env.need(memory_mib=4 * mib, disk_mib=4 * mib)
        env.log(f"pause: starting two domains and a VM of {size(mib)}")
        with (
            env.running(env.domain("attached", mib, 4), wait=False) as attached,
            env.running(env.domain("replaced", mib, 5), wait=False) as again,
            env.ours(env.guest("protected", IMAGE, mib, 4, "all"), wait=False) as own,
        ):
            for guest in (attached, again, own):
                guest.wait_ready()
            env.replace([again.name])
            again.wait_ready()
            for round_number in range(wanted.rounds):
                env.log(f"pause: {size(mib)}: round {round_number + 1} of {wanted.rounds}")
                for how, guest in ((ATTACHED, attached), (OWN, own), (REPLACED, again)):
                    checkpoints(env, how, guest, round_number, wanted)


def checkpoints(env: LibvirtEnvironment, how: str, guest: Guest, round_number: int, wanted: Checkpoints) -> None:
    """Takes checkpoints of a guest that writes its memory, and appends a row for each but the first, which is full."""
    rekindle: Rekindle = env.domains if isinstance(guest, Domain) else env.rekindle
    store = env.store().fresh(guest.name)
    count = wanted.checkpoints + 1
    with (
        loaded(guest),
        env.attached(guest) if isinstance(guest, Domain) else nullcontext(),
        protected(rekindle, guest.name, store, EVERY, None, "--count", str(count)) as protector,
    ):
        events = protector.wait("checkpoint", count, timeout=120 + 10 * count)
        protector.join()
    for event in events[1:]:
        row = row_of("pause", how, guest, round_number)
        row.load_mb, row.every_s, row.number = LOAD_MB, 1.0, event["number"]
        row.stopped_us, row.stop_host_us = event["stopped_us"], event["stopped_host_us"]
        row.dirty_bytes, row.copied_stopped_bytes = event["dirty_bytes"], event["copied_stopped_bytes"]
        row.steps = [{"step": name, "us": us} for name, us in event["steps"].items()]
        env.rows.append(row)
    store.remove()


CASES: dict[str, Callable[[LibvirtEnvironment, Plan], None]] = {
    "first": first,
    "again": again,
    "managedsave": managedsave,
    "away": away,
    "pause": pause,
    "losses": losses,
    "overlays": overlays,
    "epochs": epochs,
    "restored": restored,
    "works": works,
}
