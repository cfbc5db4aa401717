"""Suspends and resumes guests on this machine with a fault, by the commands of a host's systemd units."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.guests import Guest
from rekindle_lab.rekindle import COMMAND_DEADLINE_S, Rekindle, RekindleError

ENDING_S = 30.0
"""Deadline for killed QEMUs to end."""


@dataclass(frozen=True)
class DirectRekindle(Rekindle):
    """Rekindle as on a host whose RAM and suspend record outlive the run directory."""

    config: Path

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment of Rekindle's commands."""
        return {**super().environment, "REKINDLE_HOST_CONFIG": str(self.config)}

    def unit(self, words: Sequence[str], fault: str) -> bool:
        """Runs a unit's command with a fault, and without the fault if the first run fails, as the units do.

        Returns whether the first run failed.
        """
        first = self._run(words, fault)
        if first != 0 and (again := self._run(words, "")) != 0:
            raise RekindleError(f"rekindle {' '.join(words)}: exit status {first} with {fault}, then {again} without")
        return first != 0

    def _run(self, words: Sequence[str], fault: str) -> int:
        environment = self.environment | ({"REKINDLE_FAULT": fault} if fault else {})
        command = [str(self.binary), *words]
        with (self.run_dir.parent / "units.log").open("ab") as log:
            return subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=COMMAND_DEADLINE_S,
                check=False,
            ).returncode

    def plan(self, names: Sequence[str], token: str) -> None:
        """Writes the file that `rekindle reboot host` writes before it shuts the host down."""
        plan = {"token": token, "how": "warm", "vms": [[name, "warm"] for name in names], "kernel": None}
        (self.run_dir / ".host-plan.json").write_text(json.dumps(plan))


def reboot(
    rekindle: DirectRekindle, netns: str, suspend_dir: Path, names: Sequence[str], fault: str, token: str
) -> bool:
    """Suspends, removes what a reboot removes, and resumes. Returns whether the fault happened.

    Replaces the boot ID in the record, so that every page is compared.
    """
    rekindle.plan(names, token)
    failed = rekindle.unit(["host", "suspend", "--planned"], fault if ".suspend." in fault else "")
    end_all(rekindle.run_dir)
    shutil.rmtree(rekindle.run_dir)
    remove_taps(netns)
    head = suspend_dir / "host.json"
    if head.exists():
        head.write_text(json.dumps({**json.loads(head.read_text()), "boot_id": "of another boot"}))
    failed |= rekindle.unit(["host", "resume"], fault if ".resume." in fault else "")
    # Recovers the guests that still run.
    for name in names:
        rekindle.call("recover", name, ok=range(4))
    return failed


def processes(run_dir: Path) -> list[int]:
    """Returns the QEMUs that have this run directory on their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(run_dir) + b"/" in line and b"qemu" in line.split(b"\0")[0]:
                pids.append(int(entry.name))
    return pids


def end_all(run_dir: Path) -> None:
    """Kills the QEMUs of a run directory, as the end of a host does."""
    end = time.monotonic() + ENDING_S
    while running := processes(run_dir):
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise RekindleError(f"processes {running} do not end")
        time.sleep(0.02)


def remove_taps(netns: str) -> None:
    """Removes the taps that Rekindle has made in a namespace, as the end of a host does."""
    links = subprocess.run(
        ["ip", "-n", netns, "-json", "link", "show"], capture_output=True, text=True, check=True
    ).stdout
    for link in json.loads(links):
        if link["ifname"] != "lo":
            subprocess.run(["ip", "-n", netns, "link", "del", link["ifname"]], check=False, capture_output=True)


def outcome(guest: Guest, boot_id: str) -> str:
    """Returns a guest's outcome: see `Row.outcome`."""
    try:
        guest.wait_ready(60.0)
        if guest.command("boot-id") != boot_id:
            return "booted"
        verified = guest.command("verify")
        return "kept" if verified.startswith("ok ") and verified != "ok 0" else "gone"
    except (OSError, RuntimeError):
        return "gone"
