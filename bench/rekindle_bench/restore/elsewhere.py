"""The case `elsewhere`: a compilation continues on another host after its host has died.

The other host is another run directory and network namespace; the checkpoints are in an object store. The result must
be bit for bit that of an undisturbed run.
"""

import os
import shutil
import signal
import stat
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rekindle_bench.protect.working_guests import IMAGE
from rekindle_lab import libvirt, netns
from rekindle_lab.guests import COMMAND_PORT
from rekindle_lab.protector import Protector
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.stores import Store
from rekindle_lab.work import Window, Work

from .crashed_guests import RestoreEnvironment
from .plan import Plan
from .rows import Row

MEMORY_MIB = 512
COLUMNS = {"case": "elsewhere", "memory_mib": MEMORY_MIB, "workload": "compile", "store": "s3"}
"""Columns that all rows of this case share."""
END_DEADLINE_S = 60.0
"""Deadline for killed processes to end."""
HOST_ADDRESS, GUEST_ADDRESS = "10.89.77.1/24", "10.89.77.2/24"
"""Addresses of the host's end of the tap and of the guest that libvirt starts."""


def elsewhere(env: RestoreEnvironment, plan: Plan) -> None:
    """Measures a guest of Rekindle, then a guest of libvirt."""
    with ExitStack() as stack:
        folder = _folder_for_libvirt(env)
        config = env.work / "there.toml"
        # The other host has not run these guests before.
        config.write_text(f'[restore]\nqemu = ["{env.qemu}"]\npaths = ["{folder}"]\n')
        destination = Rekindle(env.rekindle.binary, env.work / "there", config)
        other_netns = stack.enter_context(netns.namespace(f"{env.netns}b"))
        ram = env.ram_dir / "there"
        ram.mkdir()
        _of_rekindle(env, plan, destination, other_netns, ram)
        _of_libvirt(env, plan, destination, other_netns, ram, folder)
    env.end_object_store()


def _folder_for_libvirt(env: RestoreEnvironment) -> Path:
    """Returns a folder for libvirt's files that libvirtd's user can access."""
    if all(ancestor.stat().st_mode & stat.S_IXOTH for ancestor in (env.disk_dir, *env.disk_dir.parents)):
        return env.disk_dir / "libvirt"
    return Path("/var/tmp") / f"rekindle-{os.getpid()}"


def _of_rekindle(env: RestoreEnvironment, plan: Plan, destination: Rekindle, other_netns: str, ram: Path) -> None:
    with env.working("moves", MEMORY_MIB, 13) as (guest, work):
        definition = env.work / "moves-there.toml"
        definition.write_text(replace(guest, netns=other_netns, ram_dir=ram).definition(env.qemu))
        _compile_while_host_dies(env, plan, work, destination, definition, "elsewhere", lambda: env.qemus(guest.name))
        answer = replace(guest, netns=other_netns).command("uptime")
        destination.stop(guest.name)
        if not answer.startswith("ok"):
            raise RekindleError(f"{guest.name} does not answer in {other_netns}: {answer}")


def _of_libvirt(
    env: RestoreEnvironment, plan: Plan, destination: Rekindle, other_netns: str, ram: Path, folder: Path
) -> None:
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        daemon = stack.enter_context(libvirt.daemon(folder))
        card = stack.enter_context(libvirt.tap(f"rkl{os.getpid() % 100000}", HOST_ADDRESS))
        image = env.image(IMAGE)
        domain = libvirt.create(daemon, "moves", image, MEMORY_MIB, env.qemu, card, GUEST_ADDRESS)
        pid = int((folder / "run/libvirt/qemu/run/moves.pid").read_text())
        stack.callback(_end, [pid])
        domain.command("uptime")
        env.rekindle.call("attach", "moves", "--libvirt", "moves", "--connect", daemon.uri)
        stack.callback(lambda: env.rekindle.call("detach", "moves", ok=range(256)))
        definition = env.work / "libvirt-there.toml"
        definition.write_text(
            f'name = "moves"\nmemory = "{MEMORY_MIB}M"\nqemu = "{env.qemu}"\n[ram]\ndir = "{ram}"\n'
            f'[boot]\nkernel = "{folder / "vmlinuz"}"\n'
            f'[[net]]\nkind = "tap"\nnetns = "{other_netns}"\naddress = "{HOST_ADDRESS}"\n'
        )
        work = Work(domain, env.rekindle.run_dir, domain.console)

        def kill_libvirt() -> list[int]:
            daemon.kill()
            return [pid]

        _compile_while_host_dies(env, plan, work, destination, definition, "libvirt", kill_libvirt)
        # The restored guest answers in its new namespace.
        with netns.connect(other_netns, domain.address, COMMAND_PORT, 60.0) as connection:
            connection.sendall(b"uptime\n")
            answer = connection.recv(4096).decode()
        destination.stop("moves")
        if not answer.startswith("ok"):
            raise RekindleError(f"moves does not answer in {other_netns}: {answer}")


def _end(processes: list[int]) -> None:
    for pid in processes:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + END_DEADLINE_S
    while any(Path(f"/proc/{pid}").exists() for pid in processes):
        if time.monotonic() > deadline:
            raise RekindleError(f"processes {processes} do not end")
        time.sleep(0.005)


def _compile_while_host_dies(
    env: RestoreEnvironment,
    plan: Plan,
    work: Work,
    destination: Rekindle,
    definition: Path,
    how: str,
    processes_of_host: Callable[[], list[int]],
) -> None:
    """Compiles undisturbed, then with the host's death in the middle; compares the results.

    `processes_of_host`: returns the pids that end with the host, other than the protector's.
    """
    name, count = work.guest.name, plan.units.compile
    env.log(f"elsewhere: {how}: undisturbed")
    undisturbed = work.run("compile", count)
    env.log(f"elsewhere: {how}: with the death of its host in the middle")
    store: Store = env.store("s3").fresh(f"elsewhere-{how}")
    protector = Protector(env.rekindle, name, store, "1s")
    moved: list[Row] = []  # the row of the only move, once it has happened

    def move_once(window: Window) -> None:
        _, progress = window.marks[-1]
        if moved or progress < count / 2 or len(protector.of("checkpoint")) < 2:
            return
        processes = processes_of_host()
        protector.kill()
        _end(processes)
        died_us = time.time_ns() // 1000
        newest_us = protector.of("checkpoint")[-1]["stopped_host_us"]
        restored = destination.call(
            "restore", name, "--store", store.url, *store.options, "--definition", str(definition)
        )
        us, lost_us = restored["us"], died_us - newest_us
        moved.append(Row(what="restore", how=how, round=0, restore_us=us, told_us=us, lost_us=lost_us, **COLUMNS))
        work.read_console(destination.run_dir / name / "console.log")

    try:
        protector.wait("checkpoint")
        window = work.run("compile", count, on_mark=move_once)
    finally:
        protector.kill()
    if not moved:
        raise RekindleError(f"elsewhere: {how}: the work finished before its host could die; give it more units")
    env.rows.append(moved[0])
    round_number = 0 if how == "elsewhere" else 1
    for label, measured in (("undisturbed", undisturbed), (how, window)):
        row = Row(what="window", how=label, round=round_number, **COLUMNS)
        row.units, row.digest = measured.count, measured.digest
        env.rows.append(row)
    if window.digest != undisturbed.digest:
        raise RekindleError(f"elsewhere: {how}: the work gave {window.digest}, undisturbed {undisturbed.digest}")
    store.remove()
