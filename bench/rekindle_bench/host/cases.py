"""The cases: which guests and hosts are rebooted, and how often. The analysis judges the rows."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rekindle_lab.rekindle import RekindleError

from . import direct, reboot
from .emulated_hosts import HostEnvironment
from .machine import Guest, Machine, MachineError, machine
from .plan import SMALL_MIB, Plan
from .rows import HOWS, Row

FAULTS = (
    "host.suspend.journalled:kill",
    "host.suspend.stopped:kill",
    "host.suspend.saved:kill",
    "host.suspend.listed:kill",
    "host.suspend.committed:kill",
    "host.suspend.ended:kill",
    "host.resume.placed:kill",
    "host.resume.loaded:kill",
    "host.resume.loaded:kill-new",
    "host.resume.struck:kill",
    "host.resume.resumed:kill",
    "host.resume.recorded:kill",
)
"""Every numbered point of a suspend and a resume, except the points at which a killed Rekindle would take a running
QEMU along: the death of a running QEMU would not be a fault of a reboot."""
UNIT = "/etc/systemd/system/rekindle-{part}.service.d/fault.conf"
SUSPEND_WITH = """[Service]
ExecStop=
ExecStop=/usr/bin/env REKINDLE_FAULT={fault} /usr/bin/rekindle host suspend --planned
"""
RESUME_WITH = """[Service]
ExecStart=
ExecStart=/usr/bin/rekindle host mount
ExecStart=/bin/sh -c 'test -e /run/hit || {{ >/run/hit; export REKINDLE_FAULT={fault}; }}; exec rekindle host resume'
"""
PARTNERS = 2
"""Number of guests in a reboot with a fault: either all of them or none are suspended."""


class Rounds:
    """The remaining reboots of one case, for as long as the plan's time lasts."""

    def __init__(self, env: HostEnvironment, plan: Plan, case: str) -> None:
        """Counts the reboots whose rows exist already as done."""
        self.env, self.plan, self.case = env, plan, case

    def of(self, how: str, vms: int, memory_mib: int, count: int, where: str = "emulated") -> Iterator[int]:
        """Yields the numbers of the remaining reboots."""
        finished = self.env.done.get((self.case, how, vms, memory_mib, where), 0)
        for number in range(finished, count):
            if self.plan.budget_s is not None and time.monotonic() - self.env.began > self.plan.budget_s:
                self.env.left_out.append(f"{self.case}, {vms} x {memory_mib}M, {how}: no time left for round {number}")
                return
            self.env.log(f"{self.case}: {vms} x {memory_mib}M, {how}, {number + 1} of {count}")
            yield number


@contextmanager
def host(env: HostEnvironment) -> Iterator[Machine]:
    """Starts an emulated host for one case."""
    env.hosts += 1
    with machine(env.root, env.rekindle.binary, env.image("micro").folder, env.disk_dir / f"h{env.hosts}") as emulated:
        yield emulated


def ways(env: HostEnvironment, plan: Plan, case: str, vms: int, memory_mib: int, counts: dict[str, int]) -> None:
    """Reboots a number of guests in each way, in one emulated host."""
    rounds = Rounds(env, plan, case)
    left = {how: list(rounds_left(env, case, how, vms, memory_mib, counts)) for how in HOWS}
    if not any(left.values()):
        return
    with host(env) as emulated, reboot.with_guests(emulated, vms, memory_mib) as guests:
        for how in HOWS:
            for number in rounds.of(how, vms, memory_mib, counts.get(how, 0)):
                rebooted = reboot_once(env, emulated, guests, case, number, how)
                if how in env.breakdown_of(vms) and number == 0:
                    env.records.append(
                        {
                            "how": how,
                            "vms": vms,
                            "command_us": rebooted.command_us,
                            "stages": rebooted.stages,
                            "probe": rebooted.probes[guests[0].name],
                        }
                    )


def rounds_left(env: HostEnvironment, case: str, how: str, vms: int, memory_mib: int, counts: dict[str, int]) -> range:
    """Returns the numbers of the reboots that have no rows yet."""
    return range(env.done.get((case, how, vms, memory_mib, "emulated"), 0), counts.get(how, 0))


def reboot_once(
    env: HostEnvironment, emulated: Machine, guests: Sequence[Guest], case: str, number: int, how: str, fault: str = ""
) -> reboot.Rebooted:
    """Reboots once and appends the rows; afterwards all guests are ready for another reboot."""
    rebooted = reboot.reboot(emulated, env.rekindle, guests, how, fault=bool(fault))
    if rebooted.token != (how == "warm"):
        raise MachineError(f"the kernel was {'' if rebooted.token else 'not '}entered by kexec, with --how {how}")
    for guest in guests:
        emulated.ask(f"rekindle recover {guest.name} || :")
    sessions = {guest.name: guest.echoes(b"after") for guest in guests}
    outcomes = {guest.name: guest.outcome() for guest in guests}
    for row in reboot.rows(case, number, guests, rebooted, outcomes, sessions):
        env.rows.append(replace(row, fault=fault))
    for guest in guests:
        if outcomes[guest.name] != "kept" or guest.session is None or not sessions[guest.name]:
            guest.fill()
    return rebooted


def sizes(env: HostEnvironment, plan: Plan) -> None:
    """Reboots with one guest, from small to large."""
    for memory_mib, counts in plan.sizes.items():
        ways(env, plan, "sizes", 1, memory_mib, counts)


def counts(env: HostEnvironment, plan: Plan) -> None:
    """Reboots with one small guest, then with several."""
    for vms, rounds_by_way in plan.counts.items():
        ways(env, plan, "counts", vms, SMALL_MIB, rounds_by_way)


def losses(env: HostEnvironment, plan: Plan) -> None:
    """Reboots warm several times in a row, with connections open during all reboots."""
    ways(env, plan, "losses", PARTNERS, SMALL_MIB, {"warm": plan.losses})


def faults(env: HostEnvironment, plan: Plan) -> None:
    """Reboots warm with a fault at a random point: first guests on this machine, then an emulated host."""
    rounds = Rounds(env, plan, "faults")
    numbers = list(range(env.done.get(("faults", "warm", PARTNERS, SMALL_MIB, "direct"), 0), plan.direct))
    if numbers:
        on_this_machine(env, rounds, plan.direct)
    finished = env.done.get(("faults", "warm", PARTNERS, SMALL_MIB, "emulated"), 0)
    if finished >= plan.emulated:
        return
    with host(env) as emulated, reboot.with_guests(emulated, PARTNERS, SMALL_MIB) as guests:
        for number in rounds.of("warm", PARTNERS, SMALL_MIB, plan.emulated):
            fault = random.Random(f"emulated {number}").choice(FAULTS)
            part, text = ("suspend", SUSPEND_WITH) if ".suspend." in fault else ("resume", RESUME_WITH)
            emulated.ask("rm -rf /etc/systemd/system/rekindle-*.service.d")
            emulated.write(UNIT.format(part=part), text.format(fault=fault))
            emulated.ask("systemctl daemon-reload")
            reboot_once(env, emulated, guests, "faults", number, "warm", fault)


def on_this_machine(env: HostEnvironment, rounds: Rounds, wanted: int) -> None:
    """Suspends guests of this machine under TCG, ends their QEMUs, and resumes the guests as after a boot."""
    suspend_dir, config = env.work / "suspended", env.work / "host.toml"
    config.write_text(f'suspend_dir = "{suspend_dir}"\n')
    rekindle = direct.DirectRekindle(env.rekindle.binary, env.work / "run", config)
    aside = replace(env, rekindle=rekindle)
    guests = [env.guest(f"direct{n}", "micro", SMALL_MIB, n) for n in range(1, PARTNERS + 1)]
    with aside.ours(guests[0]), aside.ours(guests[1]):
        for number in rounds.of("warm", PARTNERS, SMALL_MIB, wanted, "direct"):
            for guest in guests:
                guest.command("touch 32M 7")
            boots = {guest.name: guest.command("boot-id") for guest in guests}
            fault = random.Random(f"direct {number}").choice(FAULTS)
            names = [guest.name for guest in guests]
            note = ""
            try:
                if not direct.reboot(rekindle, env.netns, suspend_dir, names, fault, f"round{number}"):
                    note = "the fault did not happen"
            except RekindleError as error:
                note = str(error)[:300]
                env.errors.append(f"faults {number}, {fault}: {note}")
            for guest in guests:
                became = direct.outcome(guest, boots[guest.name])
                env.rows.append(
                    Row(
                        "faults",
                        "warm",
                        PARTNERS,
                        SMALL_MIB,
                        number,
                        guest.name,
                        "direct",
                        outcome=became,
                        fault=fault,
                        note=note,
                    )
                )
                if became == "gone":
                    raise RekindleError(f"{guest.name} is lost after {fault}")


CASES: dict[str, Callable[[HostEnvironment, Plan], None]] = {
    "counts": counts,
    "sizes": sizes,
    "losses": losses,
    "faults": faults,
}
