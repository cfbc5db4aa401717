"""The command `rekindle-lab plan`: makes a plan of a fleet (`make`), prints it, and writes one host's timers.

A plan has, for each kind of VM, the techniques to renew (reboot) its VMM and its OS with their intervals (`Choice`),
and the order in which the hosts are renewed (`Rolling`). `of_host` extracts the part of one host for its timers;
`as_json` and `text` format the plan. A host is away while its VMs are unavailable or degraded by a renewal; the
capacity is the share of hosts that are not away.
"""

import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import typer

from rekindle_lab.failure import fail
from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import DAY_S, ParameterError, Timers
from rekindle_lab.plan import choose
from rekindle_lab.plan.choose import Choice, HostChoice, VmKind, interval_with_one_os_reboot_less
from rekindle_lab.plan.fleet import Fleet, Hosts, Vms, load
from rekindle_lab.plan.rolling import CapacityLimits, Rolling, capacity_limits, roll, with_vms
from rekindle_lab.plan.timers import TICK_S, HostPlan, Vm, units
from rekindle_lab.tables import table
from rekindle_lab.toml import DefinitionError

MAX_PRINTED_HOSTS = 10


class VmsKey(NamedTuple):
    """The names of hosts and of VMs on them, as in the plan's file."""

    hosts: str
    vms: str


@dataclass(frozen=True)
class Plan:
    """A complete plan."""

    fleet: Fleet
    choices: dict[VmsKey, Choice]
    """The choice for each kind of VM."""
    rolling: Rolling
    crowded: tuple[str, ...]
    """Hosts for which no techniques keep the capacity, as text."""
    performance: float
    """Average throughput of all hosts, as a share (to 1) of their throughput without renewals."""

    @property
    def problems(self) -> list[str]:
        """The parts of the target that cannot be reached."""
        missed = [
            f"{key.hosts}/{key.vms}: availability {choice.availability:.6f}, "
            f"the target is {self.fleet.availability:g}; "
            f"with {choice.vmm} and {choice.os} it needs {self._needs(choice)}"
            for key, choice in self.choices.items()
            if not choice.meets
        ]
        return [*missed, *self.crowded, *self.rolling.conflicts]

    def _needs(self, choice: Choice) -> str:
        """Returns what would make a missed choice meet the target, as text."""
        technique, reboot = self.fleet.vmm[choice.vmm], self.fleet.os[choice.os]
        shorter_s = interval_with_one_os_reboot_less(technique, choice)
        if shorter_s is not None and self.fleet.availability is not None:
            shorter = availability(technique, reboot, Timers(shorter_s, choice.os_interval_s))
            if shorter >= self.fleet.availability:
                days = math.floor(shorter_s / DAY_S * 1e4) / 1e4  # rounded down: a longer interval has the reboot again
                return f"an interval of the VMM of {days:g} days: it contains one OS reboot less"
        return "longer intervals or shorter downtimes"


def make(fleet: Fleet) -> Plan:
    """Plans techniques and intervals of each kind of host, then the order of the hosts."""
    longest = Timers(fleet.vmm_interval_max_s, fleet.os_interval_max_s)
    limits = capacity_limits(fleet, longest.vmm_interval_s, TICK_S)
    # A large fleet has many hosts with the same VMs: each combination is computed once.
    choose_for_host = cache(lambda allowed: _choose_for_host(fleet, allowed, longest, limits))
    describe_pair = cache(lambda pair: choose.describe(pair, longest, fleet.availability))
    choices: dict[VmsKey, Choice] = {}
    crowded = []
    longest_away_s, spare_hosts, performance_of_vms = 0.0, 0, 0.0
    for hosts in fleet.hosts:
        host_choice = choose_for_host(tuple(_Allowed.of(vms) for vms in hosts.vms))
        longest_away_s = max(longest_away_s, host_choice.away_s)
        if not limits.keeps(host_choice.away_s):
            crowded.append(_capacity_problem(fleet, hosts, host_choice, limits))
        for vms, pair in zip(hosts.vms, host_choice.pairs, strict=True):
            choice = describe_pair(pair)
            choices[VmsKey(hosts.name, vms.name)] = choice
            spare_hosts = max(spare_hosts, pair.technique.spare_hosts)
            performance_of_vms += hosts.count * vms.count * choice.performance
    number_of_vms = sum(hosts.count * vms.count for hosts in fleet.hosts for vms in hosts.vms)
    performance = performance_of_vms / number_of_vms * (fleet.size - spare_hosts) / fleet.size
    rolling = roll(fleet, longest.vmm_interval_s, longest_away_s, TICK_S)
    return Plan(fleet, choices, rolling, tuple(crowded), performance)


class _Allowed(NamedTuple):
    """The techniques that VMs which are alike allow, and their number."""

    vmm: tuple[str, ...]
    os: tuple[str, ...]
    count: int

    @classmethod
    def of(cls, vms: Vms) -> Self:
        return cls(vms.allow_vmm, vms.allow_os, vms.count)


def _choose_for_host(
    fleet: Fleet, allowed: tuple[_Allowed, ...], longest: Timers, limits: CapacityLimits
) -> HostChoice:
    """Chooses the techniques of the VMs of a host."""
    kinds = []
    for vms in allowed:
        techniques = [fleet.vmm[name] for name in vms.vmm]
        reboots = {name: fleet.os[name] for name in vms.os}
        kinds.append(VmKind(choose.pairs(techniques, reboots, longest, fleet.availability), vms.count))
    return choose.choose_for_host(kinds, partial(with_vms, fleet.scope), limits.keeps)


def _capacity_problem(fleet: Fleet, hosts: Hosts, host_choice: HostChoice, limits: CapacityLimits) -> str:
    """Describes hosts for which no techniques keep the capacity."""
    target = fleet.availability
    meets_target = target is not None and all(pair.availability >= target for pair in host_choice.pairs)
    condition = f" and meet availability {target:g}" if meets_target else ""
    chosen = zip(hosts.vms, host_choice.pairs, strict=True)
    best = ", ".join(f"{vms.name} by {pair.technique.name}" for vms, pair in chosen)
    return (
        f"hosts '{hosts.name}': no techniques that are allowed{condition} keep capacity {fleet.capacity:g}: "
        f"with the best ({best}) a host is unavailable or degraded for {host_choice.away_s:.4g} s, "
        f"at most {limits.most_s:.4g} s are allowed"
    )


def of_host(plan: Plan, name: str, start_unix_s: int) -> HostPlan:
    """Returns the plan of one host: its place in the order, and its VMs' OS reboots, evenly over their interval."""
    if name not in plan.rolling.hosts:
        raise DefinitionError(f"--host: no host '{name}' in the plan")
    index_in_order = plan.rolling.hosts.index(name)
    hosts = next(hosts for hosts in plan.fleet.hosts if name in hosts.names)
    phase = start_unix_s + round(index_in_order * plan.rolling.spacing_s)
    vms = tuple(_vms(plan, hosts, index_in_order, start_unix_s))
    return HostPlan(name, plan.fleet.scope, round(plan.fleet.vmm_interval_max_s), phase, vms)


def _vms(plan: Plan, hosts: Hosts, index_in_order: int, start_unix_s: int) -> list[Vm]:
    """Returns the VMs of a host, with the phases of their OS reboots."""
    named = [(vms, name) for vms in hosts.vms for name in vms.names]
    planned_vms = []
    for index, (vms, name) in enumerate(named):
        choice = plan.choices[VmsKey(hosts.name, vms.name)]
        share_of_interval = (index_in_order / plan.fleet.size + index) / len(named)
        phase = start_unix_s + round(share_of_interval * choice.os_interval_s)
        planned_vms.append(
            Vm(
                name,
                vmm=choice.vmm,
                os=choice.os,
                coupled=choice.coupled,
                os_interval_s=round(choice.os_interval_s),
                os_phase_s=phase,
            )
        )
    return planned_vms


def as_json(plan: Plan, start_unix_s: int) -> dict[str, Any]:
    """Returns the plan as JSON."""
    return {
        "scope": plan.fleet.scope,
        "target": {"availability": plan.fleet.availability, "capacity": plan.fleet.capacity},
        "reached": not plan.problems,
        "problems": plan.problems,
        "vms": [{**key._asdict(), **asdict(choice), "nines": choice.nines} for key, choice in plan.choices.items()],
        "performance": plan.performance,
        "capacity": plan.rolling.capacity,
        "at_once": plan.rolling.concurrent,
        "away_s": plan.rolling.away_s,
        "spacing_s": plan.rolling.spacing_s,
        "start_unix_s": start_unix_s,
        "order": list(plan.rolling.hosts),
        "notes": list(plan.fleet.notes),
    }


def _choices_table(plan: Plan) -> str:
    def days(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds / DAY_S:.3g} d"

    rows = [
        {
            "hosts": key.hosts,
            "VMs": key.vms,
            "VMM by": choice.vmm,
            "every": days(choice.vmm_interval_s),
            "OS by": choice.os,
            "every ": days(choice.os_interval_s),  # the space distinguishes it from the VMM's column
            "timers": "coupled" if choice.coupled else "independent",
            "availability": f"{choice.availability:.7f}",
            "nines": choice.nines,
            "target": "" if plan.fleet.availability is None else "met" if choice.meets else "MISSED",
            "shortest VMM interval": days(choice.vmm_interval_min_s),
            "shortest OS interval": days(choice.os_interval_min_s),
        }
        for key, choice in plan.choices.items()
    ]
    return table(rows, "Techniques and intervals")


def text(plan: Plan, start: datetime) -> str:
    """Formats the plan for the terminal."""
    rolling = plan.rolling
    first_hosts = [
        {"host": name, "first at": f"{start + timedelta(seconds=index * rolling.spacing_s):%Y-%m-%d %H:%M:%S} UTC"}
        for index, name in enumerate(rolling.hosts[:MAX_PRINTED_HOSTS])
    ]
    hidden = len(rolling.hosts) - MAX_PRINTED_HOSTS
    more = f"\n  and {hidden} more (--json has all)" if hidden > 0 else ""
    size, spacing, away = plan.fleet.size, f"{rolling.spacing_s:.4g} s", f"{rolling.away_s:.4g} s"
    cluster = (
        f"{size} hosts, one every {spacing}, each unavailable or degraded for {away}, started up to {TICK_S} s late: "
        f"at most {rolling.concurrent} at the same time; "
        f"capacity never below {rolling.capacity:.6f}, {plan.performance:.7f} on average"
    )
    problems = "".join(f"\n\nNOT REACHED: {problem}" for problem in plan.problems)
    notes = "".join(f"\n  {note}" for note in plan.fleet.notes)
    return f"{_choices_table(plan)}{notes}\n\n{cluster}\n\n{table(first_hosts, 'Order')}{more}{problems}"


def command(
    file: Annotated[Path, typer.Argument(help="Hosts, VMs, measured downtimes, target (TOML).")],
    start: Annotated[datetime | None, typer.Option(help="When it begins, UTC. [default: next midnight]")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    timers: Annotated[Path | None, typer.Option(help="Write systemd units of --host into this folder.")] = None,
    host: Annotated[str | None, typer.Option(help="Whose units.")] = None,
    rekindle: Annotated[str, typer.Option(help="The program's path on that host.")] = "/usr/bin/rekindle",
) -> None:
    """Plan what to renew, how and when, so that availability and capacity are kept.

    Exit status 0: the target is reached; 1: it is not, and the plan has the reason; 2: wrong input.
    """
    try:
        plan = make(load(file))
        begin = start or datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        begin = begin.replace(tzinfo=UTC)
        if timers is not None:
            if host is None and plan.fleet.size > 1:
                raise DefinitionError("--timers needs --host: units belong to one host")
            host_plan = of_host(plan, host or plan.rolling.hosts[0], int(begin.timestamp()))
            _write_units(host_plan, rekindle, timers)
    except (DefinitionError, ParameterError, OSError) as error:
        raise fail("plan", error) from error
    print(json.dumps(as_json(plan, int(begin.timestamp()))) if json_out else text(plan, begin))
    raise typer.Exit(1 if plan.problems else 0)


def _write_units(host_plan: HostPlan, rekindle: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in units(host_plan, rekindle).items():
        (folder / name).write_text(content)
    (folder / "rekindle-renew").chmod(0o755)
