"""The case: a guest is booted on the source host and moved in each way in turn. Each move appends a row.

Two run directories and two network namespaces of one machine serve as the two hosts. Every way uses the machine's
loopback as its link: `ssh` is a script that starts the destination's Rekindle, QEMU's migration uses TCP, and
checkpoints use TLS to a store and from it. `move-local` has its store in a folder, which crosses no link.
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
QUIET_S = 2.0
"""Time in s for which a client uses the guest's service before the move."""
FILL_DEADLINE_S = 300.0


@dataclass(frozen=True)
class DestinationHost:
    """The destination host."""

    rekindle: Rekindle
    netns: str
    ram: Path
    ssh: Path

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
        yield DestinationHost(destination, other_netns, ram, ssh)


def moves(env: ProtectEnvironment, plan: Plan) -> None:
    """Moves guests of each size under each load, in each way."""
    with _there(env) as destination:
        for number in range(plan.rounds):
            for mib, touch in plan.sizes.items():
                for load in plan.loads:
                    env.log(f"move: round {number + 1} of {plan.rounds}: {size(mib)}, {load} MB/s")
                    for how in HOWS:
                        _move_once(env, destination, mib, touch, load, how, number)


def _move_once(
    env: ProtectEnvironment, destination: DestinationHost, mib: int, touch: str, load: int, how: str, number: int
) -> None:
    env.need(memory_mib=2 * mib, disk_mib=2 * mib)
    guest = env.guest("goes", IMAGE, mib, 21, touch)
    row = Row("moves", mib, f"dirty {load}" if load else "idle", how, STORES.get(how, ""), number)
    with env.ours(guest), ExitStack() as stack:
        if load:
            guest.command(f"dirty {load} 64 random")
        began: list[float] = []
        with env.rekindle.probes([(guest.echo_url, guest.netns)], every="2ms", margin_s=QUIET_S) as probes:
            began.append(time.time())
            if how in STORES:
                store = env.store(STORES[how]).fresh("goes")
                stack.callback(store.remove)
                stack.callback(lambda: destination.rekindle.call("stop", guest.name, "--now", ok=range(256)))
                stop = _ours(env, destination, guest, store, row)
            else:
                stop = _qemu(env, destination, guest, how, row)
        if stop is not None:
            _service(probes[0], began[0], stop, row)
        env.rows.append(row)


def _ours(env: ProtectEnvironment, destination: DestinationHost, guest: Guest, store: Store, row: Row) -> float:
    """Runs `rekindle move`; returns when the guest was stopped, in s since 1970."""
    definition = env.work / "goes-there.toml"
    definition.write_text(destination.guest_there(guest).definition(env.qemu))
    reach = ("--to", "there", "--ssh", str(destination.ssh), "--rekindle", str(destination.rekindle.binary))
    started = time.time()
    moved = env.rekindle.call(
        "move",
        guest.name,
        *reach,
        "--store",
        store.url,
        *store.options,
        "--create-store",
        "--definition",
        str(definition),
    )
    row.stopped_us, row.total_us = moved["stopped_us"], moved["us"]
    row.pauses_us = sum(one["stopped_us"] for one in moved["rounds"])
    row.rounds, row.last_bytes = len(moved["rounds"]), moved["last_bytes"]
    row.steps = [{"step": name, "us": us} for name, us in moved["pause"].items()]
    timeline = (destination.rekindle.run_dir / guest.name / "timeline.jsonl").read_text().splitlines()
    restored = [one for one in map(json.loads, timeline) if one["operation"] == "restore" and one["phase"] != "settle"]
    row.steps += [{"step": THERE + one["step"], "us": one["us"]} for one in restored]
    fill = destination.rekindle.run_dir / guest.name / "fill.json"
    deadline = time.monotonic() + FILL_DEADLINE_S
    while fill.exists():
        if time.monotonic() > deadline:
            raise RekindleError(f"{guest.name}: not all of its memory has arrived")
        time.sleep(0.005)
    row.whole_us = int((time.time() - started) * 1e6)
    destination.guest_there(guest).wait_ready()
    return started + (moved["us"] - moved["stopped_us"]) / 1e6


def _qemu(env: ProtectEnvironment, destination: DestinationHost, guest: Guest, how: str, row: Row) -> float | None:
    """Runs QEMU's migration; returns when the guest was stopped, in s since 1970, or `None` if it never was."""
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


def _service(probe: Probe, began: float, stop: float, row: Row) -> None:
    """Records the service's rate before, and from the command until the guest was stopped."""
    report = probe.report
    width = report["interval_ms"] / 1e3
    begins = report["started_unix_ns"] / 1e9

    def rate(first: float, last: float) -> float | None:
        whole = [
            one["answered"]
            for one in report["intervals"]
            if first <= begins + one["start_ms"] / 1e3 and begins + one["start_ms"] / 1e3 + width <= last
        ]
        return sum(whole) / (len(whole) * width) if whole else None

    row.before_per_s, row.during_per_s = rate(begins + width, began), rate(began, stop)


CASES: dict[str, Callable[[ProtectEnvironment, Plan], None]] = {"moves": moves}
