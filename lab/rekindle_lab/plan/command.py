"""The command `rekindle-lab plan`."""

import json
import math
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle_lab.failure import fail
from rekindle_lab.models.availability import availability
from rekindle_lab.models.parameters import DAY_S, ParameterError, Timers
from rekindle_lab.plan import choose
from rekindle_lab.plan.choose import Choice, Pair, before_an_os_reboot
from rekindle_lab.plan.fleet import Fleet, Hosts, load
from rekindle_lab.plan.rolling import CapacityLimits, Rolling, capacity_limits, roll, with_vms
from rekindle_lab.plan.timers import TICK_S, HostPlan, Vm, units
from rekindle_lab.tables import table
from rekindle_lab.toml import DefinitionError

SHOWN = 10


@dataclass(frozen=True)
class Plan:
    """A complete plan."""

    fleet: Fleet
    choices: dict[tuple[str, str], Choice]
    """Choices by the names of hosts and VMs in the file."""
    rolling: Rolling
    crowded: tuple[str, ...]
    """Hosts for which no techniques keep the capacity, as text."""
    performance: float
    """Average throughput of all hosts, as a share (to 1) of their throughput without renewals."""

    @property
    def problems(self) -> list[str]:
        """The parts of the target that cannot be reached."""
        missed = [
            f"{hosts}/{vms}: availability {choice.availability:.6f}, the target is {self.fleet.availability:g}; "
            f"with {choice.vmm} and {choice.os} it needs {self._needs(choice)}"
            for (hosts, vms), choice in self.choices.items()
            if not choice.meets
        ]
        return [*missed, *self.crowded, *self.rolling.conflicts]

    def _needs(self, choice: Choice) -> str:
        target = self.fleet.availability
        before = before_an_os_reboot(self.fleet.vmm[choice.vmm], choice)
        if before is not None and target is not None:
            up = availability(
                self.fleet.vmm[choice.vmm], self.fleet.os[choice.os], Timers(before, choice.os_interval_s)
            )
            if up >= target:
                days = math.floor(before / DAY_S * 1e4) / 1e4
                return f"an interval of the VMM of {days:g} days: it contains one OS reboot less"
        return "longer intervals or shorter downtimes"


def make(fleet: Fleet) -> Plan:
    """Plans techniques and intervals of each kind of host, then the order of the hosts."""
    longest = Timers(fleet.vmm_interval_max_s, fleet.os_interval_max_s)
    limits = capacity_limits(fleet, longest.vmm_interval_s, TICK_S)
    taken = cache(lambda vms: _taken(fleet, vms, longest, limits))
    of_pair = cache(lambda pair: choose.choice(pair, longest, fleet.availability))
    choices: dict[tuple[str, str], Choice] = {}
    crowded = []
    away_s, spare, served, all_vms = 0.0, 0, 0.0, 0
    for hosts in fleet.hosts:
        pairs, host_s = taken(tuple((vms.allow_vmm, vms.allow_os, vms.count) for vms in hosts.vms))
        away_s = max(away_s, host_s)
        if not limits.keeps(host_s):
            crowded.append(_capacity_problem(fleet, hosts, pairs, host_s, limits))
        for vms, pair in zip(hosts.vms, pairs, strict=True):
            choice = of_pair(pair)
            choices[hosts.name, vms.name] = choice
            spare = max(spare, pair.technique.spare_hosts)
            count = hosts.count * vms.count
            served += count * choice.performance
            all_vms += count
    performance = served / all_vms * (fleet.size - spare) / fleet.size
    rolling = roll(fleet, longest.vmm_interval_s, away_s, TICK_S)
    return Plan(fleet, choices, rolling, tuple(crowded), performance)


def _taken(
    fleet: Fleet, vms: tuple[tuple[tuple[str, ...], tuple[str, ...], int], ...], longest: Timers, limits: CapacityLimits
) -> tuple[tuple[Pair, ...], float]:
    """Returns the pairs for a host whose VMs allow `vms` (VMM, OS, how many), and how long the host is unavailable."""
    kinds = []
    for allow_vmm, allow_os, count in vms:
        techniques = [fleet.vmm[name] for name in allow_vmm]
        reboots = [(name, fleet.os[name]) for name in allow_os]
        kinds.append((choose.pairs(techniques, reboots, longest, fleet.availability), count))
    return choose.best(kinds, partial(with_vms, fleet.scope), limits.keeps)


def _capacity_problem(
    fleet: Fleet, hosts: Hosts, pairs: tuple[Pair, ...], host_s: float, limits: CapacityLimits
) -> str:
    target = fleet.availability
    meet = target is not None and all(pair.availability >= target for pair in pairs)
    by = ", ".join(f"{vms.name} by {pair.technique.name}" for vms, pair in zip(hosts.vms, pairs, strict=True))
    return (
        f"hosts '{hosts.name}': no techniques that are allowed{f' and meet availability {target:g}' if meet else ''} "
        f"keep capacity {fleet.capacity:g}: with the best ({by}) a host is unavailable or degraded for {host_s:.4g} s, "
        f"at most {limits.most_s:.4g} s are allowed"
    )


def of_host(plan: Plan, name: str, start_unix_s: int) -> HostPlan:
    """Returns the plan of one host: its place in the order, and its VMs' OS reboots, evenly over their interval."""
    if name not in plan.rolling.hosts:
        raise DefinitionError(f"--host: no host '{name}' in the plan")
    place = plan.rolling.hosts.index(name)
    hosts = next(one for one in plan.fleet.hosts if name in one.names)
    vms = _vms(plan, hosts, place, start_unix_s)
    phase = start_unix_s + round(place * plan.rolling.spacing_s)
    return HostPlan(name, plan.fleet.scope, round(plan.fleet.vmm_interval_max_s), phase, tuple(vms))


def _vms(plan: Plan, hosts: Hosts, place: int, start_unix_s: int) -> list[Vm]:
    named = [(vms, name) for vms in hosts.vms for name in vms.names]
    found = []
    for index, (vms, name) in enumerate(named):
        choice = plan.choices[hosts.name, vms.name]
        share = (place / plan.fleet.size + index) / len(named)
        phase = start_unix_s + round(share * choice.os_interval_s)
        found.append(Vm(name, choice.vmm, choice.os, choice.coupled, round(choice.os_interval_s), phase))
    return found


def as_json(plan: Plan, start_unix_s: int) -> dict[str, Any]:
    """Returns the plan as JSON."""
    return {
        "scope": plan.fleet.scope,
        "target": {"availability": plan.fleet.availability, "capacity": plan.fleet.capacity},
        "reached": not plan.problems,
        "problems": plan.problems,
        "vms": [
            {"hosts": hosts, "vms": vms, **asdict(choice), "nines": choice.nines}
            for (hosts, vms), choice in plan.choices.items()
        ],
        "performance": plan.performance,
        "capacity": plan.rolling.capacity,
        "at_once": plan.rolling.concurrent,
        "away_s": plan.rolling.away_s,
        "spacing_s": plan.rolling.spacing_s,
        "start_unix_s": start_unix_s,
        "order": list(plan.rolling.hosts),
        "notes": list(plan.fleet.notes),
    }


def text(plan: Plan, start: datetime) -> str:
    """Formats the plan for the terminal."""

    def days(seconds: float | None) -> str:
        return "" if seconds is None else f"{seconds / DAY_S:.3g} d"

    rows = [
        {
            "hosts": hosts,
            "VMs": vms,
            "VMM by": choice.vmm,
            "every": days(choice.vmm_interval_s),
            "OS by": choice.os,
            "every ": days(choice.os_interval_s),
            "timers": "coupled" if choice.coupled else "independent",
            "availability": f"{choice.availability:.7f}",
            "nines": choice.nines,
            "target": "" if plan.fleet.availability is None else "met" if choice.meets else "MISSED",
            "shortest VMM interval": days(choice.vmm_interval_min_s),
            "shortest OS interval": days(choice.os_interval_min_s),
        }
        for (hosts, vms), choice in plan.choices.items()
    ]
    rolling = plan.rolling
    shown = [
        {"host": name, "first at": f"{start + timedelta(seconds=index * rolling.spacing_s):%Y-%m-%d %H:%M:%S} UTC"}
        for index, name in enumerate(rolling.hosts[:SHOWN])
    ]
    more = f"\n  and {len(rolling.hosts) - SHOWN} more (--json has all)" if len(rolling.hosts) > SHOWN else ""
    size, spacing, away = plan.fleet.size, f"{rolling.spacing_s:.4g} s", f"{rolling.away_s:.4g} s"
    cluster = (
        f"{size} hosts, one every {spacing}, each unavailable or degraded for {away}, started up to {TICK_S} s late: "
        f"at most {rolling.concurrent} at the same time; "
        f"capacity never below {rolling.capacity:.6f}, {plan.performance:.7f} on average"
    )
    problems = "".join(f"\n\nNOT REACHED: {problem}" for problem in plan.problems)
    notes = "".join(f"\n  {note}" for note in plan.fleet.notes)
    what = f"{table(rows, 'Techniques and intervals')}{notes}"
    return f"{what}\n\n{cluster}\n\n{table(shown, 'Order')}{more}{problems}"


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
            own = of_host(plan, host or plan.rolling.hosts[0], int(begin.timestamp()))
            timers.mkdir(parents=True, exist_ok=True)
            for name, content in units(own, rekindle).items():
                (timers / name).write_text(content)
            (timers / "rekindle-renew").chmod(0o755)
    except (DefinitionError, ParameterError, OSError) as error:
        raise fail("plan", error) from error
    print(json.dumps(as_json(plan, int(begin.timestamp()))) if json_out else text(plan, begin))
    raise typer.Exit(1 if plan.problems else 0)
