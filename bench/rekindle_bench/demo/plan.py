"""Writes a plan for the VM that the demo has measured: how to renew its VMM and its OS, and the resulting availability.

    python -m rekindle_bench.demo.plan --web web.json --out plan.toml warm.json saved.json cold.json

The records are those of `demo.vmm`, `web.json` is written by `demo.web`. `plan.toml` has the usual format of a plan
(lab/README.md); edit it, then give it to `rekindle-lab plan`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle_lab.models.availability import availability, nines
from rekindle_lab.models.parameters import DAY_S, ParameterError, Timers
from rekindle_lab.plan.command import Plan, make
from rekindle_lab.plan.fleet import load as load_fleet
from rekindle_lab.records import Record, load
from rekindle_lab.tables import table
from rekindle_lab.toml import DefinitionError

HEAD = """\
# Written by the demo from single measurements. Edit it, then run: rekindle-lab plan plan.toml
scope = "vmm"
vmm_interval_max_d = 28      # as in RootHammer; `rekindle-lab aging` finds what aging allows
os_interval_max_d = 7
[target]
availability = 0.9999
"""
"""The start of the plan's file."""
COLD = "cold"
TAIL = """
[[hosts]]
name = "this-host"
[[hosts.vms]]
name = "demo"
"""


def write(records: Sequence[Record], web: Sequence[dict[str, Any]]) -> str:
    """Returns the plan's file: service gaps of the renewals of the VMM and of the OS, with the loss of throughput.

    The guest of `demo.web` has a disk with a rate limit, the guest of `demo.vmm` has none. A cold renewal of the VMM
    boots the guest in a new QEMU, as the cold reboot of `demo.web` does. The plan uses the gap of that cold reboot for
    both: otherwise one boot would have two durations.
    """
    parts = [HEAD]
    for record in records:
        if record.how != COLD:
            parts.append(f"[vmm.{record.how}]\nvmm_downtime_s = {record.gap_ms / 1e3:.3f}\n")
    for measured in web:
        if measured["how"] == COLD:
            parts.append(f"[vmm.{COLD}]\nvmm_downtime_s = {measured['gap_s']:.3f}\ncoupled = true\n")
    for measured in web:
        lost = min(max(1 - measured["mb_per_s_after"] / measured["mb_per_s_before"], 0.0), 1.0)
        degraded = (
            f"degraded_rate = {lost:.3f}\ndegraded_s = {max(measured['served_s'] - measured['well_s'], 0.0):.1f}\n"
        )
        parts.append(f"[os.{measured['how']}]\ndowntime_s = {measured['gap_s']:.3f}\n{degraded}")
    return "".join(parts) + TAIL


def text(plan: Plan) -> str:
    """Lists every pair of techniques, and marks the chosen one."""
    fleet = plan.fleet
    longest = Timers(fleet.vmm_interval_max_s, fleet.os_interval_max_s)
    (choice,) = plan.choices.values()
    target = fleet.availability or 0.0
    rows = []
    for technique in fleet.vmm.values():
        for name, reboot in fleet.os.items():
            up = availability(technique, reboot, longest)
            rows.append(
                {
                    "VMM by": technique.name,
                    "OS by": name,
                    "downtime in 28 days": f"{(1 - up) * 28 * DAY_S:.1f} s",
                    "availability": f"{up:.7f}",
                    "nines": nines(up),
                    f"target {target:g}": "met" if up >= target else "MISSED",
                    "": "<- the plan" if (technique.name, name) == (choice.vmm, choice.os) else "",
                }
            )
    days = f"the VMM every {longest.vmm_interval_s / DAY_S:g} days, the OS every {longest.os_interval_s / DAY_S:g}"
    problems = "".join(f"\nNOT REACHED: {problem}" for problem in plan.problems)
    return f"{table(rows, f'Renewing {days}')}{problems}"


def main(
    files: Annotated[list[Path], typer.Argument(help="Records of the VMM's renewals.")],
    web: Annotated[Path, typer.Option(help="JSON written by `demo.web`.")],
    out: Annotated[Path, typer.Option(help="The plan's file to write.")],
) -> None:
    """Write the plan's file, and print the plan."""
    try:
        out.write_text(write([load(path) for path in files], json.loads(web.read_text())))
        plan = make(load_fleet(out))
    except KeyError as error:
        print(f"demo: {web}: not a file of demo.web: it has no {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except (OSError, ValueError, TypeError, DefinitionError, ParameterError) as error:
        print(f"demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(text(plan))


if __name__ == "__main__":
    typer.run(main)
