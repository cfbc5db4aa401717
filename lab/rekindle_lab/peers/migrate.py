"""QEMU's own migration of a running guest to another QEMU: the peer of `rekindle move`.

The source is the QEMU that Rekindle has started, so hardware, load and place are the same. The destination was started
before and listens over TCP on this machine's loopback. The bandwidth limit is off, to QEMU's advantage.

- `live`: `migrate`. QEMU stops the guest at the end, once it expects that sending the rest takes no longer than its
  downtime limit, 300 ms by default. So with a fast link QEMU stops the guest early, with much left to send.
- `live-20ms`, `live-2ms`: with that downtime limit. If the guest writes faster than that allows, the migration never
  ends.
- `non-live`: `stop`, `migrate`, then `cont` in the destination.

Guest-stopped time runs from the source's STOP event to the destination's RESUME event, by the host clock, as for
Rekindle.
"""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.netns import Tap
from rekindle_lab.peers.cpr import PeerError
from rekindle_lab.qmp import Qmp, QmpError

DEADLINE_S = 300.0
CONVERGE_S = 60.0
"""Seconds after which a migration that has not stopped the guest counts as not converging."""
LIVE = {"live": 300, "live-20ms": 20, "live-2ms": 2}
"""Live migrations, with their downtime limits in ms."""


class NotConvergedError(PeerError):
    """The guest writes too fast for the downtime limit, and continues in the source."""


@dataclass(frozen=True)
class Vm:
    """The VM that migrates: its binary, command line and directory, as Rekindle shows them."""

    binary: str
    command_line: Sequence[str]
    vmm_directory: str


@dataclass(frozen=True)
class Migrated:
    """One migration. Times by the host clock are microseconds since 1970."""

    stop_host_us: int
    resume_host_us: int
    total_us: int
    """From the command until the guest runs in the destination, with all of its memory."""

    @property
    def stopped_us(self) -> int:
        """Guest-stopped time in microseconds."""
        return self.resume_host_us - self.stop_host_us


def arguments(vm: Vm, folder: Path, ram: Path, tap_fd: int) -> list[str]:
    """Returns the command line of the destination QEMU: the same hardware, with files of its own in `folder`."""
    given = [word for word in vm.command_line if word != "-S"]
    if given and not given[0].startswith("-"):
        given.pop(0)  # the binary
    while "-incoming" in given:
        at = given.index("-incoming")
        del given[at : at + 2]
    text = "\n".join(given)
    places = {vm.vmm_directory: str(folder)}
    places |= {found: str(folder / "console.log") for found in re.findall(r"logfile=([^,\n]+)", text)}
    places |= {found: str(ram) for found in re.findall(r"mem-path=([^,\n]+)", text)}
    longest_first = re.compile("|".join(re.escape(place) for place in sorted(places, key=len, reverse=True)))
    given = [longest_first.sub(lambda found: places[found[0]], word) for word in given]
    given = [re.sub(r"\bfd=\d+", f"fd={tap_fd}", word) if word.startswith("tap,") else word for word in given]
    return [*given, "-incoming", "defer"]


@contextmanager
def waiting(vm: Vm, folder: Path, tap: Tap, ram: Path) -> Iterator[Qmp]:
    """Runs a QEMU that waits for the guest; ends it when the body ends."""
    folder.mkdir(parents=True)
    log = folder / "qemu.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [vm.binary, *arguments(vm, folder, ram, tap.fd)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[tap.fd],
            start_new_session=True,
        )
    try:
        with Qmp(folder / "qmp.sock", DEADLINE_S, alive=lambda: process.poll() is None) as qmp:
            yield qmp
    except QmpError as error:
        raise PeerError(f"migration: {error}; the target's log: {log.read_text(errors='replace')[-1000:]}") from error
    finally:
        process.kill()
        process.wait()
        ram.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def migrate(source: Qmp, target: Qmp, how: str) -> Migrated:
    """Migrates the guest from `source` to `target`, in one of the `LIVE` ways or `non-live`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        uri = f"tcp:127.0.0.1:{free.getsockname()[1]}"
    for side in (source, target):
        side.execute("migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]})
    limit = {"downtime-limit": LIVE[how]} if how in LIVE else {}
    source.execute("migrate-set-parameters", {"max-bandwidth": 1 << 50, **limit})
    target.execute("migrate-incoming", {"uri": uri})
    source.forget_events()
    target.forget_events()
    started_us = time.time_ns() // 1000
    if how == "non-live":
        source.execute("stop")
    source.execute("migrate", {"uri": uri})
    try:
        stopped = source.wait_event("STOP", DEADLINE_S if how == "non-live" else CONVERGE_S)
    except QmpError as error:
        source.execute("migrate_cancel")
        if source.execute("query-status")["running"]:
            raise NotConvergedError(f"{how}: the guest was not stopped within {CONVERGE_S:g} s: {error}") from error
        raise
    if how == "non-live":
        _done(target)
        _continue(target)
    resumed = target.wait_event("RESUME", DEADLINE_S)
    return Migrated(stopped.host_us, resumed.host_us, resumed.host_us - started_us)


def _done(qmp: Qmp) -> None:
    while True:
        status = qmp.wait_event("MIGRATION", DEADLINE_S).data["status"]
        if status == "completed":
            return
        if status in ("failed", "cancelled"):
            raise PeerError(f"{qmp.path}: the migration has {status}")


def _continue(qmp: Qmp) -> None:
    """Continues the guest; QEMU rejects `cont` for a moment after it has reported completion."""
    deadline = time.monotonic() + qmp.timeout
    while True:
        try:
            qmp.execute("cont")
            return
        except QmpError as error:
            if "not finalized" not in str(error) or time.monotonic() > deadline:
                raise
