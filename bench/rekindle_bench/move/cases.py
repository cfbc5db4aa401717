"""The only case: a guest is booted on the source host and moved in each way in turn. Each move appends a row.

Two run directories and two network namespaces of one machine serve as the two hosts. Every way uses the machine's
loopback as its link: `ssh` is a script that starts the destination's Rekindle, QEMU's migration uses TCP, and
checkpoints go to an object store and from it. `move-local` has its store in a folder, which crosses no link.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle_bench.protect.working_guests import ProtectEnvironment
from rekindle_lab import netns
from rekindle_lab.guests import Guest, size
from rekindle_lab.netns import Tap
from rekindle_lab.peers import migrate
from rekindle_lab.rekindle import Probe, Rekindle, RekindleError
from rekindle_lab.stores import Store

from .plan import Plan
from .rows import HOWS, STORES, THERE, Row

IMAGE = "micro"
INDEX = 21
"""Network of the guest: `Guest.index`."""
WRITTEN_MB = 64
"""Size of the area that the guest writes under load."""
BEFORE_S = 2.0
"""Time in s for which a client uses the guest's service before the move."""
FILL_DEADLINE_S = 300.0
"""Deadline in s for all memory to arrive in the destination after a move."""


@dataclass(frozen=True)
class DestinationHost:
    """The destination host: another run directory and network namespace."""

    rekindle: Rekindle
    netns: str
    ram: Path
    """Folder of guest RAM."""
    ssh: Path
    """A script in place of ssh, which runs its command with the destination's run directory."""

    def guest_there(self, guest: Guest) -> Guest:
        """Returns the guest as reached on the destination host."""
        return replace(guest, netns=self.netns, ram_dir=self.ram)


@contextmanager
def _there(env: ProtectEnvironment) -> Iterator[DestinationHost]:
    with ExitStack() as stack:
        other_netns = stack.enter_context(netns.namespace(f"{env.netns}b"))
        ram = env.ram_dir / "there"
        ram.mkdir(exist_ok=True)
        destination = Rekindle(env.rekindle.binary, env.work / "there")
        ssh = env.work / "ssh"
        ssh.write_text(f'#!/bin/sh\nshift\nREKINDLE_RUN_DIR={destination.run_dir} exec sh -c "$*"\n')
        ssh.chmod(0o755)
        yield DestinationHost(rekindle=destination, netns=other_netns, ram=ram, ssh=ssh)


def moves(env: ProtectEnvironment, plan: Plan) -> None:
    """Moves guests of each size under each load, in each way."""
    with _there(env) as destination:
        for round_number in range(plan.rounds):
            for mib, touch in plan.filled_by_mib.items():
                for load in plan.loads_mb_per_s:
                    env.log(f"move: round {round_number + 1} of {plan.rounds}: {size(mib)}, {load} MB/s")
                    for how in HOWS:
                        _move_once(env, destination, mib, touch, load, how, round_number)


def _move_once(
    env: ProtectEnvironment, destination: DestinationHost, mib: int, touch: str, load: int, how: str, round_number: int
) -> None:
    """Boots a guest, moves it, and appends the row. `touch`: memory that the guest fills; `load`: MB/s it writes."""
    env.need(memory_mib=2 * mib, disk_mib=2 * mib)
    guest = env.guest("goes", IMAGE, mib, INDEX, touch)
    row = Row(
        case="moves",
        memory_mib=mib,
        load=f"dirty {load}" if load else "idle",
        how=how,
        store=STORES.get(how, ""),
        round=round_number,
    )
    with env.ours(guest), ExitStack() as stack:
        if load:
            guest.command(f"dirty {load} {WRITTEN_MB} random")
        with env.rekindle.probes([(guest.echo_url, guest.netns)], every="2ms", margin_s=BEFORE_S) as probes:
            began_s = time.time()
            if how in STORES:
                store = env.store(STORES[how]).fresh("goes")
                stack.callback(store.remove)
                stack.callback(lambda: destination.rekindle.call("stop", guest.name, "--now", ok=range(256)))
                stopped_s = _move_by_rekindle(env, destination, guest, store, row)
            else:
                stopped_s = _migrate_by_qemu(env, destination, guest, how, row)
        if stopped_s is not None:
            _fill_service_rates(row, probes[0], began_s, stopped_s)
        env.rows.append(row)


def _move_by_rekindle(
    env: ProtectEnvironment, destination: DestinationHost, guest: Guest, store: Store, row: Row
) -> float:
    """Runs `rekindle move` and fills the row; returns when the guest was stopped, in s since 1970."""
    definition = env.work / "goes-there.toml"
    definition.write_text(destination.guest_there(guest).definition(env.qemu))
    options = ["--to", "there", "--ssh", str(destination.ssh), "--rekindle", str(destination.rekindle.binary)]
    options += ["--store", store.url, *store.options, "--create-store", "--definition", str(definition)]
    started = time.time()
    moved = env.rekindle.call("move", guest.name, *options)
    row.stopped_us, row.total_us = moved["stopped_us"], moved["us"]
    row.pauses_us = sum(checkpoint["stopped_us"] for checkpoint in moved["rounds"])
    row.rounds, row.last_bytes = len(moved["rounds"]), moved["last_bytes"]
    row.steps = [{"step": name, "us": us} for name, us in moved["pause"].items()]
    timeline = (destination.rekindle.run_dir / guest.name / "timeline.jsonl").read_text().splitlines()
    for step in map(json.loads, timeline):
        if step["operation"] == "restore" and step["phase"] != "settle":
            row.steps.append({"step": THERE + step["step"], "us": step["us"]})
    fill = destination.rekindle.run_dir / guest.name / "fill.json"
    deadline = time.monotonic() + FILL_DEADLINE_S
    while fill.exists():
        if time.monotonic() > deadline:
            raise RekindleError(f"{guest.name}: not all of its memory has arrived")
        time.sleep(0.005)
    row.whole_us = int((time.time() - started) * 1e6)
    destination.guest_there(guest).wait_ready()
    return started + (moved["us"] - moved["stopped_us"]) / 1e6


def _migrate_by_qemu(
    env: ProtectEnvironment, destination: DestinationHost, guest: Guest, how: str, row: Row
) -> float | None:
    """Runs QEMU's migration and fills the row.

    Returns when the guest was stopped, in s since 1970, or `None` if it never was.
    """
    shown = env.rekindle.show(guest.name)
    tap = Tap(f"rkm{os.getpid() % 100000}", destination.netns, guest.host_address)
    try:
        with env.qmp(guest) as source:
            ram = destination.ram / "migrated.ram"
            vm = migrate.Vm(env.qemu, shown["command_line"], shown["vmm"]["directory"])
            with migrate.running_destination(vm, env.work / "migrated", tap, ram) as target:
                migrated = migrate.migrate(source, target.qmp, how)
                destination.guest_there(guest).wait_ready()
    except migrate.NotConvergedError as error:
        row.converged = 0
        env.log(str(error))
        return None
    finally:
        tap.close()
    row.converged = 1 if how in migrate.LIVE else None
    row.stopped_us, row.total_us, row.whole_us = migrated.stopped_us, migrated.total_us, migrated.total_us
    return migrated.stop_host_us / 1e6


def _fill_service_rates(row: Row, probe: Probe, began_s: float, stopped_s: float) -> None:
    """Records the service's rate before the command, and from the command until the guest was stopped."""
    report = probe.report
    length_s = report["interval_ms"] / 1e3
    probe_began_s = report["started_unix_ns"] / 1e9

    def rate(first_s: float, last_s: float) -> float | None:
        """Returns answers per second over the whole intervals between two times; `None` if there is none."""
        answered = []
        for interval in report["intervals"]:
            start_s = probe_began_s + interval["start_ms"] / 1e3
            if first_s <= start_s and start_s + length_s <= last_s:
                answered.append(interval["answered"])
        return sum(answered) / (len(answered) * length_s) if answered else None

    # The first interval has the probe's own start.
    row.before_per_s, row.during_per_s = rate(probe_began_s + length_s, began_s), rate(began_s, stopped_s)


CASES: dict[str, Callable[[ProtectEnvironment, Plan], None]] = {"moves": moves}
