"""The cases of host reboots, listed in `CASES` at the end: which guests and hosts are rebooted, and how often.

An *emulated host* is a QEMU that runs a whole KVM host (tests/hosts); its guests are guests of guests. For *direct*
rows there is none: guests of this machine are suspended and resumed, as around a host's reboot.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rekindle_lab.rekindle import RekindleError

from . import direct, reboot
from .emulated_hosts import HostEnvironment
from .fault_points import FAULTS, Fault
from .machine import Guest, Machine, MachineError, machine
from .plan import SMALL_MIB, Plan
from .rows import HOWS, Row

DROP_IN = "/etc/systemd/system/rekindle-{command}.service.d/fault.conf"
"""Drop-in of the systemd unit that runs `rekindle host COMMAND` on an emulated host."""
DROP_IN_TEXT = {
    "suspend": """[Service]
ExecStop=
ExecStop=/usr/bin/env REKINDLE_FAULT={fault} /usr/bin/rekindle host suspend --planned
""",
    # The fault must happen once only: systemd starts a failed resume again.
    "resume": """[Service]
ExecStart=
ExecStart=/bin/sh -c 'test -e /run/hit || {{ >/run/hit; export REKINDLE_FAULT={fault}; }}; exec rekindle host resume'
""",
}
"""The drop-in's content, which injects a fault into the unit's command, by command."""
FAULT_VMS = 2
"""Number of guests in a reboot with a fault: either all of them or none are suspended."""


class Rounds:
    """The remaining reboots of one case, for as long as the plan's time lasts."""

    def __init__(self, env: HostEnvironment, plan: Plan, case: str) -> None:
        self.env = env
        self.plan = plan
        self.case = case

    def remaining(self, how: str, vms: int, memory_mib: int, count: int, where: str = "emulated") -> range:
        """Returns the numbers of the reboots, of `count` in total, that have no rows of an earlier run."""
        return range(self.env.finished.get((self.case, how, vms, memory_mib, where), 0), count)

    def until_late(self, how: str, vms: int, memory_mib: int, count: int, where: str = "emulated") -> Iterator[int]:
        """Yields the numbers of the remaining reboots, until the time is over."""
        for round_number in self.remaining(how, vms, memory_mib, count, where):
            if self.plan.budget_s is not None and time.monotonic() - self.env.began > self.plan.budget_s:
                self.env.left_out.append(
                    f"{self.case}, {vms} x {memory_mib}M, {how}: no time left for round {round_number}"
                )
                return
            self.env.log(f"{self.case}: {vms} x {memory_mib}M, {how}, {round_number + 1} of {count}")
            yield round_number


@contextmanager
def host(env: HostEnvironment) -> Iterator[Machine]:
    """Starts an emulated host for one case."""
    env.hosts += 1
    with machine(env.root, env.rekindle.binary, env.image("micro").folder, env.disk_dir / f"h{env.hosts}") as emulated:
        yield emulated


def reboot_in_each_way(
    env: HostEnvironment, plan: Plan, case: str, vms: int, memory_mib: int, counts: dict[str, int]
) -> None:
    """Reboots a number of guests in each way, in one emulated host. `counts`: number of reboots by way."""
    rounds = Rounds(env, plan, case)
    if not any(rounds.remaining(how, vms, memory_mib, counts.get(how, 0)) for how in HOWS):
        return
    with host(env) as emulated, reboot.with_guests(emulated, vms, memory_mib) as guests:
        for how in HOWS:
            for round_number in rounds.until_late(how, vms, memory_mib, counts.get(how, 0)):
                rebooted = reboot_once(env, emulated, guests, case, round_number, how)
                if how in env.breakdown_of(vms) and round_number == 0:
                    env.records.append(_throughput_record(how, vms, rebooted, guests[0].name))


def _throughput_record(how: str, vms: int, rebooted: reboot.Rebooted, guest_name: str) -> dict[str, Any]:
    """Returns what figure 8 shows of one reboot: its stages, and the report of a guest's client."""
    return {
        "how": how,
        "vms": vms,
        "command_us": rebooted.command_us,
        "stages": rebooted.stages,
        "probe": rebooted.probes[guest_name],
    }


def reboot_once(
    env: HostEnvironment,
    emulated: Machine,
    guests: Sequence[Guest],
    case: str,
    round_number: int,
    how: str,
    fault: str = "",
) -> reboot.Rebooted:
    """Reboots once and appends the rows; afterwards all guests are ready for another reboot."""
    rebooted = reboot.reboot(emulated, env.rekindle, guests, how, fault=bool(fault))
    if rebooted.entered_by_kexec != (how == "warm"):
        raise MachineError(
            f"the kernel was {'' if rebooted.entered_by_kexec else 'not '}entered by kexec, with --how {how}"
        )
    for guest in guests:
        emulated.ask(f"rekindle recover {guest.name} || :")
    sessions = {guest.name: guest.echoes(b"after") for guest in guests}
    outcomes = {guest.name: guest.outcome() for guest in guests}
    for row in reboot.rows(case, round_number, guests, rebooted, outcomes, sessions):
        env.rows.append(replace(row, fault=fault))
    for guest in guests:
        if outcomes[guest.name] != "kept" or guest.session is None or not sessions[guest.name]:
            guest.fill()
    return rebooted


def sizes(env: HostEnvironment, plan: Plan) -> None:
    """Reboots with one guest, from small to large."""
    for memory_mib, counts in plan.ways_by_mib.items():
        reboot_in_each_way(env, plan, "sizes", 1, memory_mib, counts)


def counts(env: HostEnvironment, plan: Plan) -> None:
    """Reboots with one small guest, then with several."""
    for vms, rounds_by_way in plan.ways_by_vms.items():
        reboot_in_each_way(env, plan, "counts", vms, SMALL_MIB, rounds_by_way)


def losses(env: HostEnvironment, plan: Plan) -> None:
    """Reboots warm several times in a row, with connections open during all reboots."""
    reboot_in_each_way(env, plan, "losses", FAULT_VMS, SMALL_MIB, {"warm": plan.rounds_in_a_row})


def faults(env: HostEnvironment, plan: Plan) -> None:
    """Reboots warm with a fault at a random point: first guests on this machine, then an emulated host."""
    rounds = Rounds(env, plan, "faults")
    if rounds.remaining("warm", FAULT_VMS, SMALL_MIB, plan.direct_faults, "direct"):
        reboot_guests_of_this_machine(env, rounds, plan.direct_faults)
    if not rounds.remaining("warm", FAULT_VMS, SMALL_MIB, plan.emulated_faults):
        return
    with host(env) as emulated, reboot.with_guests(emulated, FAULT_VMS, SMALL_MIB) as guests:
        for round_number in rounds.until_late("warm", FAULT_VMS, SMALL_MIB, plan.emulated_faults):
            fault = random.Random(f"emulated {round_number}").choice(FAULTS)
            emulated.ask("rm -rf /etc/systemd/system/rekindle-*.service.d")
            emulated.write(DROP_IN.format(command=fault.command), DROP_IN_TEXT[fault.command].format(fault=fault))
            emulated.ask("systemctl daemon-reload")
            reboot_once(env, emulated, guests, "faults", round_number, "warm", str(fault))


def reboot_guests_of_this_machine(env: HostEnvironment, rounds: Rounds, count: int) -> None:
    """Suspends guests of this machine under TCG, ends their QEMUs, and resumes the guests as after a boot.

    `count`: number of reboots in total. A guest that is lost ends the case, since the next reboot needs it.
    """
    suspend_dir, config = env.work / "suspended", env.work / "host.toml"
    config.write_text(f'suspend_dir = "{suspend_dir}"\n')
    rekindle = direct.DirectRekindle(env.rekindle.binary, env.work / "run", config, suspend_dir=suspend_dir)
    on_host = replace(env, rekindle=rekindle)
    guests = [env.guest(f"direct{n}", "micro", SMALL_MIB, n) for n in range(1, FAULT_VMS + 1)]
    with on_host.ours(guests[0]), on_host.ours(guests[1]):
        for round_number in rounds.until_late("warm", FAULT_VMS, SMALL_MIB, count, "direct"):
            for guest in guests:
                guest.command("touch 32M 7")
            boot_ids = {guest.name: guest.command("boot-id") for guest in guests}
            fault = random.Random(f"direct {round_number}").choice(FAULTS)
            note = _reboot_directly(env, rekindle, list(boot_ids), fault, round_number)
            for guest in guests:
                row = _direct_row(guest.name, round_number, direct.outcome(guest, boot_ids[guest.name]), fault, note)
                env.rows.append(row)
                if row.outcome == "gone":
                    raise RekindleError(f"{guest.name} is lost after {fault}")


def _reboot_directly(
    env: HostEnvironment, rekindle: direct.DirectRekindle, names: list[str], fault: Fault, round_number: int
) -> str:
    """Suspends and resumes guests of this machine with a fault. Returns what went wrong, empty if nothing did."""
    try:
        has_happened = direct.reboot(rekindle, env.netns, names, fault, token=f"round{round_number}")
    except RekindleError as error:
        note = str(error)[:300]
        env.errors.append(f"faults {round_number}, {fault}: {note}")
        return note
    return "" if has_happened else "the fault did not happen"


def _direct_row(vm: str, round_number: int, outcome: str, fault: Fault, note: str) -> Row:
    return Row(
        case="faults",
        how="warm",
        vms=FAULT_VMS,
        memory_mib=SMALL_MIB,
        round=round_number,
        vm=vm,
        where="direct",
        outcome=outcome,
        fault=str(fault),
        note=note,
    )


CASES: dict[str, Callable[[HostEnvironment, Plan], None]] = {
    "counts": counts,
    "sizes": sizes,
    "losses": losses,
    "faults": faults,
}
