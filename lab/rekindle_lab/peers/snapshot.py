"""QEMU's own ways to save a running guest to a file: the peers of a checkpoint and of a restore.

Each save goes through QMP and is of the guest that Rekindle protects by turns, so hardware, load and place are the
same. The QEMU was started with `suppress-vmdesc=on`, which makes the state smaller. The bandwidth limit is off. No way
syncs its file, which is to QEMU's advantage.

- `background-snapshot`: the guest is stopped for its device state and for write-protecting its memory. It then runs
  while memory is saved, each page before it is changed. The peer of Rekindle's pause.
- `mapped-ram` (QEMU 9 and later): a live migration into a file in which every page has its place; the guest is
  stopped to save the pages that are dirty at the end. It is resumed as soon as QEMU reports completion.
- `full`: `stop`, everything saved, `cont`.

Guest-stopped time runs from QEMU's STOP event to its RESUME event, as for Rekindle.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.netns import Tap
from rekindle_lab.peers.cpr import PeerError
from rekindle_lab.peers.destination import Vm, resume, running_destination, wait_completed
from rekindle_lab.peers.migrate import UNLIMITED_BYTES_PER_S
from rekindle_lab.qmp import Qmp, QmpError

WAYS = ("background-snapshot", "mapped-ram", "full")
"""The ways to save a guest, as described above; the first two are capabilities of QEMU's migration."""
_CAPABILITIES = ("background-snapshot", "mapped-ram", "events")
SAVE_DEADLINE_S = 120.0
"""Deadline for each of the events that a save or a restore waits for."""


@dataclass(frozen=True)
class SaveResult:
    """One save. Times by the host clock are microseconds since 1970."""

    stop_host_us: int
    resume_host_us: int
    took_us: int
    """From the command until QEMU reported completion."""
    bytes: int
    """Bytes that the file occupies on the disk."""

    @property
    def stopped_us(self) -> int:
        """Guest-stopped time in microseconds."""
        return self.resume_host_us - self.stop_host_us


def save(qmp: Qmp, how: str, path: Path) -> SaveResult:
    """Saves the guest to `path` in one of the `WAYS`, and resumes it. Raises `PeerError` if QEMU fails."""
    path.unlink(missing_ok=True)
    known = {entry["capability"] for entry in qmp.execute("query-migrate-capabilities")}
    if how in ("background-snapshot", "mapped-ram") and how not in known:
        raise PeerError(f"this QEMU has no {how}")
    _set_capabilities(qmp, [how, "events"], known)
    qmp.execute("migrate-set-parameters", {"max-bandwidth": UNLIMITED_BYTES_PER_S})
    qmp.forget_events()
    started = time.monotonic()
    try:
        if how == "full":
            qmp.execute("stop")
        qmp.execute("migrate", {"uri": f"file:{path}"})
        stopped = qmp.wait_event("STOP", SAVE_DEADLINE_S)
        if how == "background-snapshot":
            resumed = qmp.wait_event("RESUME", SAVE_DEADLINE_S)
            wait_completed(qmp, SAVE_DEADLINE_S)
        else:
            wait_completed(qmp, SAVE_DEADLINE_S)
            resumed = resume(qmp)
        took_us = int((time.monotonic() - started) * 1e6)
    except QmpError as error:
        state = qmp.execute("query-migrate")
        if qmp.execute("query-status")["status"] != "running":
            qmp.execute("cont")
        raise PeerError(f"{how}: {error}; QEMU reports: {state.get('error-desc', state.get('status'))}") from error
    finally:
        _set_capabilities(qmp, [], known)
    bytes_on_disk = path.stat().st_blocks * 512  # the unit of st_blocks, by stat(2)
    return SaveResult(stopped.host_us, resumed.host_us, took_us=took_us, bytes=bytes_on_disk)


def _set_capabilities(qmp: Qmp, wanted: Sequence[str], known: set[str]) -> None:
    """Turns the `wanted` capabilities on and the others off, of those that this QEMU has (`known`)."""
    settings = [{"capability": name, "state": name in wanted} for name in _CAPABILITIES if name in known]
    qmp.execute("migrate-set-capabilities", {"capabilities": settings})


@dataclass(frozen=True)
class RestoreResult:
    """A guest that QEMU itself has restored from a file. Times are microseconds."""

    restore_us: int
    """From the start of QEMU's process to the RESUME event."""
    steps: list[dict[str, Any]]
    """Steps as in the JSON of a reboot: phase, step, start_host_us, us."""


def restore(
    binary: str, command_line: Sequence[str], vmm_directory: str, folder: Path, path: Path, tap: Tap, ram: Path
) -> RestoreResult:
    """Loads the full save `path` into a new QEMU; ends that QEMU once its guest runs.

    `command_line` and `vmm_directory` are those of the VM that was saved. `folder` is made and removed.
    """
    vm = Vm(binary, command_line, vmm_directory)
    waiting = running_destination(vm, folder, tap, ram, operation="-incoming file", deadline_s=SAVE_DEADLINE_S)
    with waiting as destination:
        connected_us = time.time_ns() // 1000
        _set_capabilities(destination.qmp, ["events"], {"events"})
        destination.qmp.execute("migrate-incoming", {"uri": f"file:{path}"})
        wait_completed(destination.qmp, SAVE_DEADLINE_S)
        resumed_us = resume(destination.qmp).host_us  # the guest was stopped when it was saved
    started_us = destination.started_host_us
    steps = [
        _step("start QEMU", started_us, connected_us),
        _step("load everything, resume", connected_us, resumed_us),
    ]
    return RestoreResult(resumed_us - started_us, steps)


def _step(name: str, begin_us: int, end_us: int) -> dict[str, Any]:
    return {"phase": "renew", "step": name, "start_host_us": begin_us, "us": end_us - begin_us}
