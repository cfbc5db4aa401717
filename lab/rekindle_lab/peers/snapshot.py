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

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.netns import Tap
from rekindle_lab.peers.cpr import PeerError
from rekindle_lab.qmp import Event, Qmp, QmpError

WAYS = ("background-snapshot", "mapped-ram", "full")
_CAPABILITIES = ("background-snapshot", "mapped-ram", "events")
SAVE_DEADLINE_S = 120.0


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
    known = {one["capability"] for one in qmp.execute("query-migrate-capabilities")}
    if how in ("background-snapshot", "mapped-ram") and how not in known:
        raise PeerError(f"this QEMU has no {how}")
    _set(qmp, [how, "events"], known)
    qmp.execute("migrate-set-parameters", {"max-bandwidth": 1 << 50})
    qmp.forget_events()
    started = time.monotonic()
    try:
        if how == "full":
            qmp.execute("stop")
        qmp.execute("migrate", {"uri": f"file:{path}"})
        stop = qmp.wait_event("STOP", SAVE_DEADLINE_S)
        if how == "background-snapshot":
            resume = qmp.wait_event("RESUME", SAVE_DEADLINE_S)
            _done(qmp)
        else:
            _done(qmp)
            resume = _continue(qmp)
        took_us = int((time.monotonic() - started) * 1e6)
    except QmpError as error:
        state = qmp.execute("query-migrate")
        if qmp.execute("query-status")["status"] != "running":
            qmp.execute("cont")
        raise PeerError(f"{how}: {error}; QEMU reports: {state.get('error-desc', state.get('status'))}") from error
    finally:
        _set(qmp, [], known)
    return SaveResult(stop.host_us, resume.host_us, took_us, path.stat().st_blocks * 512)


def _continue(qmp: Qmp) -> Event:
    """Continues the guest; QEMU rejects `cont` for a moment after it has reported completion."""
    deadline = time.monotonic() + qmp.timeout
    while True:
        try:
            qmp.execute("cont")
            return qmp.wait_event("RESUME")
        except QmpError as error:
            if "not finalized" not in str(error) or time.monotonic() > deadline:
                raise


def _set(qmp: Qmp, wanted: Sequence[str], known: set[str]) -> None:
    settings = [{"capability": name, "state": name in wanted} for name in _CAPABILITIES if name in known]
    qmp.execute("migrate-set-capabilities", {"capabilities": settings})


def _done(qmp: Qmp) -> None:
    """Waits until the save has ended; raises unless it is complete."""
    while True:
        status = qmp.wait_event("MIGRATION", SAVE_DEADLINE_S).data["status"]
        if status == "completed":
            return
        if status in ("failed", "cancelled"):
            raise QmpError(f"{qmp.path}: the migration has {status}")


@dataclass(frozen=True)
class RestoreResult:
    """A guest that QEMU itself has restored from a file. Times are microseconds."""

    restore_us: int
    """From the start of QEMU's process to the RESUME event."""
    steps: list[dict[str, Any]]


def restore(
    binary: str, command_line: Sequence[str], vmm_directory: str, folder: Path, path: Path, tap: Tap, ram: Path
) -> RestoreResult:
    """Loads the full save `path` into a new QEMU; ends that QEMU once its guest runs.

    `command_line` and `vmm_directory` are those of the VM that was saved. `folder` is made and removed.
    """
    folder.mkdir(parents=True)
    text = "\n".join(command_line)
    given = [word for word in command_line if word != "-S"]
    if not given[0].startswith("-"):
        given.pop(0)
    while "-incoming" in given:
        at = given.index("-incoming")
        del given[at : at + 2]
    places = {vmm_directory: str(folder)}
    places |= {found: str(folder / "console.log") for found in re.findall(r"logfile=([^,\n]+)", text)}
    places |= {found: str(ram) for found in re.findall(r"mem-path=([^,\n]+)", text)}
    longest_first = re.compile("|".join(re.escape(place) for place in sorted(places, key=len, reverse=True)))
    given = [longest_first.sub(lambda found: places[found[0]], word) for word in given]
    given = [re.sub(r"\bfd=\d+", f"fd={tap.fd}", word) if word.startswith("tap,") else word for word in given]
    log = folder / "qemu.log"
    launched = time.time_ns() // 1000
    with log.open("wb") as out:
        process = subprocess.Popen(
            [binary, *given, "-incoming", "defer"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[tap.fd],
            start_new_session=True,
        )
    try:
        with Qmp(folder / "qmp.sock", SAVE_DEADLINE_S, alive=lambda: process.poll() is None) as qmp:
            started = time.time_ns() // 1000
            _set(qmp, ["events"], {"events"})
            qmp.execute("migrate-incoming", {"uri": f"file:{path}"})
            _done(qmp)
            resumed = _continue(qmp)  # the guest was stopped when it was saved
    except QmpError as error:
        raise PeerError(f"-incoming file: {error}; QEMU's log: {log.read_text(errors='replace')[-1000:]}") from error
    finally:
        process.kill()
        process.wait()
        ram.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    spans = [("start QEMU", launched, started), ("load everything, resume", started, resumed.host_us)]
    steps = [{"phase": "renew", "step": step, "start_host_us": a, "us": b - a} for step, a, b in spans]
    return RestoreResult(resumed.host_us - launched, steps)
