"""The command `rekindle-lab model`: availability, throughput and crossings of techniques, as tables or figures.

A technique is a way to renew the VMM; at a crossing, one overtakes another. `command` reads the parameters
(`load_parameters`), computes the rows of the tables (`results`), and prints them as JSON or as text.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle_lab.failure import fail
from rekindle_lab.models import crossing, figures, throughput
from rekindle_lab.models.availability import availability, downtime_s, nines, os_reboots
from rekindle_lab.models.moves import with_moves
from rekindle_lab.models.parameters import DAY_S, PAPER, ParameterError, Parameters, Timers, by_hand, measured
from rekindle_lab.models.simulation import simulate
from rekindle_lab.tables import table


def load_parameters(
    *,
    paper: str | None,
    file: Path | None,
    results: Path | None,
    guests: str | None,
    os_guests: str | None,
    os_downtime_s: float | None,
) -> Parameters:
    """Returns the parameters that the options select. Raises `ParameterError`."""
    if sum(option is not None for option in (paper, file, results)) != 1:
        raise ParameterError("give one of --paper, --parameters and --measured")
    if paper is not None:
        if paper not in PAPER:
            raise ParameterError(f"--paper: no '{paper}'; there are: {', '.join(PAPER)}")
        return PAPER[paper]
    if file is not None:
        return by_hand(file)
    if guests is None:
        raise ParameterError("--measured needs --guests, as in the first column of its table")
    return measured(results, guests, os_guests, os_downtime_s)  # type: ignore[arg-type]


def technique_rows(parameters: Parameters, hosts: int) -> list[dict[str, Any]]:
    """Returns the models' results for each technique, with units in the names."""
    os, timers = parameters.os, parameters.timers
    rows = []
    for name, technique in parameters.techniques.items():
        share_of_time_up = availability(technique, os, timers)
        rows.append(
            {
                "technique": name,
                "availability": round(share_of_time_up, 9),
                "nines": nines(share_of_time_up),
                "downtime_s_per_vmm_interval": round(downtime_s(technique, os, timers), 4),
                "os_reboots_per_vmm_interval": round(os_reboots(technique, timers), 5),
                "performance": round(throughput.performance(technique, os, timers), 9),
                f"index_of_{hosts}_hosts": round(throughput.index(technique, os, timers, hosts), 9),
            }
        )
    return rows


def crossings_table(parameters: Parameters) -> list[dict[str, Any]]:
    """Returns all crossings of each two techniques: in hosts, and in both intervals up to four times their values.

    Only where both techniques are possible: clusters larger than their spare hosts, intervals longer than a renewal.
    """
    vmm_s, os_s = parameters.timers.vmm_interval_s, parameters.timers.os_interval_s
    divisor = 28  # the paper's VMM interval over a day
    rows = []
    for name, other in combinations(parameters.techniques, 2):
        crossings_by_quantity = {
            "hosts": crossing.in_hosts(parameters, name, other),
            "os_interval_d": crossing.in_os_interval(
                parameters, name, other, low_s=os_s / divisor, high_s=4 * max(vmm_s, os_s)
            ),
            "vmm_interval_d": crossing.in_vmm_interval(
                parameters, name, other, low_s=vmm_s / divisor, high_s=vmm_s * 4
            ),
        }
        for quantity, crossings in crossings_by_quantity.items():
            unit = DAY_S if quantity.endswith("_d") else 1.0
            rows += [
                {"of": name, "and": other, "in": quantity, "at": point.at / unit, "jump": point.jump}
                for point in crossings
            ]
    return rows


def compare_with_simulation(parameters: Parameters, seed: int) -> list[dict[str, Any]]:
    """Compares the closed forms with a simulation."""
    rows = []
    for name, technique in parameters.techniques.items():
        simulated = simulate(technique, parameters.os, parameters.timers, seed=seed)
        estimates = ((availability, simulated.availability), (throughput.performance, simulated.performance))
        for formula, estimate in estimates:
            value = formula(technique, parameters.os, parameters.timers)
            rows.append(
                {
                    "technique": name,
                    "what": formula.__name__,
                    "formula": round(value, 9),
                    "simulated": round(estimate.mean, 9),
                    "ci99_low": round(estimate.low, 9),
                    "ci99_high": round(estimate.high, 9),
                    "agrees": estimate.contains(value),
                }
            )
    return rows


def write_figures(own: Parameters | None, out: Path) -> list[Path]:
    """Draws figures 9, 10 and 16 as PNG, with the paper's parameters and with `own`; writes the curves as CSV."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for number, curves, paper, label in (
        (9, figures.figure_9, PAPER["jboss"], "availability"),
        (10, figures.figure_10, PAPER["jboss"], "availability"),
        (16, figures.figure_16, PAPER["cluster"], "performance index"),
    ):
        panels = {"paper": figures.Panel(paper.source, curves(paper))}
        if own is not None:
            panels["own"] = figures.Panel(own.source, curves(own))
        path = out / f"figure-{number}.png"
        figures.draw(list(panels.values()), path, label)
        written.append(path)
        for whose, panel in panels.items():
            csv = out / f"figure-{number}-{whose}.csv"
            panel.curves.to_csv(csv, index=False)
            written.append(csv)
    return written


SHARE_COLUMNS = ("availability", "performance", "formula", "simulated", "ci99_low", "ci99_high")


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Formats rows for the terminal: shares near 1 with more digits."""

    def cell(key: str, value: object) -> object:
        is_share = key in SHARE_COLUMNS or key.startswith("index_of")
        return f"{value:.8f}" if is_share and isinstance(value, float) else value

    return [{key: cell(key, value) for key, value in row.items()} for row in rows]


def command(
    paper: Annotated[str | None, typer.Option(help="RootHammer's own figures: jboss (5.5) or cluster (6).")] = None,
    parameters: Annotated[Path | None, typer.Option(help="A TOML file with measured figures.")] = None,
    measured: Annotated[Path | None, typer.Option(help="The JSON of `make bench TOPIC=vmm`.")] = None,
    guests: Annotated[str | None, typer.Option(help='Rows of that file to use, such as "11 x micro 256M".')] = None,
    os_guests: Annotated[str | None, typer.Option(help="Rows whose cold gap is that of an OS reboot.")] = None,
    os_downtime_s: Annotated[float | None, typer.Option(help="Downtime of an OS reboot, instead.")] = None,
    moves: Annotated[Path | None, typer.Option(help="The JSON of `make bench TOPIC=move`, to add.")] = None,
    move_guest: Annotated[str, typer.Option(help="Size of the guest in that file.")] = "512M",
    move_load: Annotated[str, typer.Option(help="Load of that guest.")] = "dirty 20",
    move_vms: Annotated[int, typer.Option(help="Number of such guests, which move one after the other.")] = 11,
    vmm_interval_d: Annotated[float | None, typer.Option(help="Interval of VMM renewals in days.")] = None,
    os_interval_d: Annotated[float | None, typer.Option(help="Interval of OS reboots in days.")] = None,
    hosts: Annotated[int, typer.Option(help="Size of the cluster.")] = 100,
    simulation: Annotated[bool, typer.Option("--simulate", help="Check each formula by simulation.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 1,
    figures_to: Annotated[
        Path | None, typer.Option("--figures", help="Draw figures 9, 10, 16 into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compute availability, nines and cluster throughput from measured downtimes, and where techniques cross.

    Example: rekindle-lab model --paper jboss --simulate
    """
    try:
        inputs = load_parameters(
            paper=paper,
            file=parameters,
            results=measured,
            guests=guests,
            os_guests=os_guests,
            os_downtime_s=os_downtime_s,
        )
        if moves is not None:
            inputs = with_moves(inputs, moves, guest=move_guest, load=move_load, vms=move_vms)
        timers = inputs.timers
        inputs = inputs.with_timers(
            Timers(
                timers.vmm_interval_s if vmm_interval_d is None else vmm_interval_d * DAY_S,
                timers.os_interval_s if os_interval_d is None else os_interval_d * DAY_S,
            )
        )
        document = results(inputs, hosts)
        if simulation:
            document["simulated"] = compare_with_simulation(inputs, seed)
        if figures_to is not None:
            document["figures"] = [str(path) for path in write_figures(None if paper else inputs, figures_to)]
    except (ParameterError, OSError) as error:
        raise fail("model", error) from error
    print(json.dumps(document) if as_json else text(document))


def results(parameters: Parameters, hosts: int) -> dict[str, Any]:
    """Returns the models' results for a cluster of `hosts`, as the command prints them with --json."""
    return {
        "source": parameters.source,
        "vmm_interval_s": parameters.timers.vmm_interval_s,
        "os_interval_s": parameters.timers.os_interval_s,
        "os_downtime_s": parameters.os.downtime_s,
        "notes": list(parameters.notes),
        "techniques": technique_rows(parameters, hosts),
        "crossings": crossings_table(parameters),
    }


def text(document: dict[str, Any]) -> str:
    """Formats the results for the terminal."""
    vmm_d, os_d = document["vmm_interval_s"] / DAY_S, document["os_interval_s"] / DAY_S
    title = f"{document['source']}: VMM every {vmm_d:g} days, OS every {os_d:g}"
    tables = [table(readable(document["techniques"]), title), table(document["crossings"], "Crossings")]
    if "simulated" in document:
        tables.append(table(readable(document["simulated"]), "Formula and simulation"))
    notes = [*document["notes"], *(f"wrote {path}" for path in document.get("figures", []))]
    return "\n".join(["\n\n".join(tables), *(f"  {note}" for note in notes)])
