"""A QEMU that waits for the state of a guest: the destination of a migration, or of a restore from a file.

Shared by `migrate` and `snapshot`, the peers (programs other than Rekindle) that load a guest into a new QEMU. The
destination must have the same virtual hardware as the QEMU that has the guest, so its command line is copied from that
QEMU. Everything of which two QEMUs cannot share one (sockets, log, RAM file, tap descriptor) is replaced.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.netns import Tap
from rekindle_lab.peers.cpr import PeerError
from rekindle_lab.qmp import Event, Qmp, QmpError

DEADLINE_S = 300.0
"""Deadline for QEMU's start and for its replies: long, since a slow peer is a result and not an error."""
LOG_TAIL_CHARS = 1000
"""How much of the end of QEMU's log an error includes."""


@dataclass(frozen=True)
class Vm:
    """The VM whose guest is loaded: its binary, command line and directory, as Rekindle shows them."""

    binary: str
    command_line: Sequence[str]
    vmm_directory: str


@dataclass(frozen=True)
class Destination:
    """A waiting QEMU, and when its process was started, in microseconds since 1970."""

    qmp: Qmp
    started_host_us: int


def destination_arguments(vm: Vm, folder: Path, ram: Path, tap_fd: int) -> list[str]:
    """Returns the command line of the destination QEMU: the same hardware, with files of its own in `folder`."""
    # `-S` starts a QEMU with its processors stopped, until Rekindle continues it. With `-incoming` it waits anyway, and
    # the guest must run afterwards.
    arguments = [argument for argument in vm.command_line if argument != "-S"]
    if arguments and not arguments[0].startswith("-"):
        arguments.pop(0)  # the binary
    while "-incoming" in arguments:  # of the source's own start, if that was a restore
        index = arguments.index("-incoming")
        del arguments[index : index + 2]
    text = "\n".join(arguments)  # in which file names are searched
    new_paths = {vm.vmm_directory: str(folder)}
    new_paths |= {path: str(folder / "console.log") for path in re.findall(r"logfile=([^,\n]+)", text)}
    new_paths |= {path: str(ram) for path in re.findall(r"mem-path=([^,\n]+)", text)}
    # One path can be the start of another, such as the directory and a file in it. The longer one must match first.
    any_old_path = re.compile("|".join(re.escape(path) for path in sorted(new_paths, key=len, reverse=True)))
    arguments = [any_old_path.sub(lambda match: new_paths[match[0]], argument) for argument in arguments]
    # The number of the tap's descriptor is valid only in the source's process.
    arguments = [
        re.sub(r"\bfd=\d+", f"fd={tap_fd}", argument) if argument.startswith("tap,") else argument
        for argument in arguments
    ]
    return [*arguments, "-incoming", "defer"]


@contextmanager
def running_destination(
    vm: Vm, folder: Path, tap: Tap, ram: Path, *, operation: str = "migration", deadline_s: float = DEADLINE_S
) -> Iterator[Destination]:
    """Runs a QEMU that waits for the guest; ends it, and removes `folder` and `ram`, when the body ends.

    An error of QMP in the body becomes a `PeerError` that names `operation` and has QEMU's log.
    """
    folder.mkdir(parents=True)
    log = folder / "qemu.log"
    arguments = destination_arguments(vm, folder, ram, tap.fd)
    started_host_us = time.time_ns() // 1000
    with log.open("wb") as output:
        process = subprocess.Popen(
            [vm.binary, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[tap.fd],
            start_new_session=True,
        )
    try:
        with Qmp(folder / "qmp.sock", deadline_s, alive=lambda: process.poll() is None) as qmp:
            yield Destination(qmp, started_host_us)
    except QmpError as error:
        raise PeerError(
            f"{operation}: {error}; QEMU's log: {log.read_text(errors='replace')[-LOG_TAIL_CHARS:]}"
        ) from error
    finally:
        process.kill()
        process.wait()
        ram.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def wait_completed(qmp: Qmp, deadline_s: float = DEADLINE_S) -> None:
    """Waits until a migration, also one to or from a file, has ended; raises `QmpError` unless it is complete."""
    while True:
        status = qmp.wait_event("MIGRATION", deadline_s).data["status"]
        if status == "completed":
            return
        if status in ("failed", "cancelled"):
            raise QmpError(f"{qmp.path}: the migration has {status}")


def resume(qmp: Qmp) -> Event:
    """Continues the guest; QEMU rejects `cont` for a moment after it has reported completion."""
    deadline = time.monotonic() + qmp.timeout
    while True:
        try:
            qmp.execute("cont")
            return qmp.wait_event("RESUME")
        except QmpError as error:
            if "not finalized" not in str(error) or time.monotonic() > deadline:
                raise
