"""A host's warm reboot, simulated with guests of this machine, and with a fault on the way (`reboot`).

On a real host, systemd units run `rekindle host suspend` before the reboot and `rekindle host resume` after it. Warm
means: the guests' RAM stays in place while the host gets a new kernel. Here the kernel stays; this module runs the same
two commands, and in between removes what a reboot removes: QEMU processes, taps and the run directory. Two things
survive, as on a host: the RAM files, and the *suspend record* that the first command writes and the second one reads.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rekindle_lab.guests import Guest
from rekindle_lab.rekindle import COMMAND_DEADLINE_S, Rekindle, RekindleError

from .fault_points import Fault
from .rows import Outcome

QEMUS_END_S = 30.0
"""Deadline for killed QEMUs to end."""
GUEST_READY_S = 60.0
"""Deadline for a guest to answer after a reboot."""
RECOVER_STATUSES = range(4)
"""Exit statuses of `rekindle recover`. None is an error here: `outcome` judges the guest itself."""


@dataclass(frozen=True)
class DirectRekindle(Rekindle):
    """Rekindle with the configuration of a host (`host.toml`), which puts the suspend record into `suspend_dir`."""

    suspend_dir: Path = field(kw_only=True)

    def run_as_unit(self, arguments: Sequence[str], fault: Fault | None) -> bool:
        """Runs a systemd unit's command with a fault. If it fails, runs it again without, as the unit does.

        Returns whether the first run failed.
        """
        first_status = self._exit_status(arguments, fault)
        if first_status == 0:
            return False
        second_status = self._exit_status(arguments, None)
        if second_status != 0:
            raise RekindleError(
                f"rekindle {' '.join(arguments)}: exit status {first_status} with {fault or 'no fault'}, "
                f"then {second_status} without"
            )
        return True

    def _exit_status(self, arguments: Sequence[str], fault: Fault | None) -> int:
        with (self.run_dir.parent / "units.log").open("ab") as log:
            return subprocess.run(
                [str(self.binary), *arguments],
                env=self.environment | ({"REKINDLE_FAULT": str(fault)} if fault else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=COMMAND_DEADLINE_S,
                check=False,
            ).returncode

    def write_plan(self, names: Sequence[str], token: str) -> None:
        """Writes the plan that `rekindle reboot-host` leaves for `rekindle host suspend --planned`.

        The suspend record gets the plan's `token`.
        """
        plan = {"token": token, "how": "warm", "vms": [[name, "warm"] for name in names], "kernel": None}
        (self.run_dir / ".host-plan.json").write_text(json.dumps(plan))

    def record_another_boot(self) -> None:
        """Changes the suspend record as if the guests had been suspended under another kernel.

        Within one boot, Rekindle trusts RAM without a check. After another boot it compares the digest of every page.
        """
        header = self.suspend_dir / "host.json"
        if header.exists():
            header.write_text(json.dumps({**json.loads(header.read_text()), "boot_id": "of another boot"}))


def reboot(rekindle: DirectRekindle, netns: str, names: Sequence[str], fault: Fault, token: str) -> bool:
    """Suspends the guests `names`, removes what a reboot removes, and resumes them. Returns whether the fault happened.

    `netns`: the network namespace of the guests' taps.
    """
    rekindle.write_plan(names, token)
    suspend_failed = rekindle.run_as_unit(
        ["host", "suspend", "--planned"], fault if fault.command == "suspend" else None
    )
    kill_qemus(rekindle.run_dir)
    shutil.rmtree(rekindle.run_dir)
    remove_taps(netns)
    rekindle.record_another_boot()
    resume_failed = rekindle.run_as_unit(["host", "resume"], fault if fault.command == "resume" else None)
    for name in names:
        rekindle.call("recover", name, ok=RECOVER_STATUSES)
    return suspend_failed or resume_failed


def running_qemus(run_dir: Path) -> list[int]:
    """Returns the PIDs of the QEMUs that have this run directory on their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command_line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(run_dir) + b"/" in command_line and b"qemu" in command_line.split(b"\0")[0]:
                pids.append(int(entry.name))
    return pids


def kill_qemus(run_dir: Path) -> None:
    """Kills the QEMUs of a run directory, and waits until they have ended."""
    deadline = time.monotonic() + QEMUS_END_S
    while running := running_qemus(run_dir):
        for pid in running:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise RekindleError(f"QEMUs {running} do not end within {QEMUS_END_S:g} s after SIGKILL")
        time.sleep(0.02)


def remove_taps(netns: str) -> None:
    """Removes the taps that Rekindle has made in a network namespace, which has no other link than `lo`."""
    links = subprocess.run(
        ["ip", "-n", netns, "-json", "link", "show"], capture_output=True, text=True, check=True
    ).stdout
    for link in json.loads(links):
        if link["ifname"] != "lo":
            subprocess.run(["ip", "-n", netns, "link", "del", link["ifname"]], check=False, capture_output=True)


def outcome(guest: Guest, old_boot_id: str) -> Outcome:
    """Returns what became of a guest, whose kernel had `old_boot_id` before the reboot.

    `kept`: it continues with its memory; `booted`: it has booted; `gone`: it does not answer, or its memory is damaged.
    """
    try:
        guest.wait_ready(GUEST_READY_S)
        if guest.command("boot-id") != old_boot_id:
            return "booted"
        verified = guest.command("verify")  # `ok N`: N pages of those filled before the reboot have their content
        return "kept" if verified.startswith("ok ") and verified != "ok 0" else "gone"
    except (OSError, RuntimeError):
        return "gone"
