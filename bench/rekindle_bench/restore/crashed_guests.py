"""Guests of the restore benchmark, which crash and are restored."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rekindle_bench.protect.working_guests import ProtectEnvironment, environment_of
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.stores import Store

FILL_DEADLINE_S = 600.0
_FILLED = re.compile(
    r"all memory is loaded: (\d+) pages on demand \(the longest wait (\d+) µs\), (\d+) in the background"
)


@dataclass(frozen=True)
class Restored:
    """A restore, observed from outside. Times are microseconds."""

    restore_us: int
    """From the start of the command until the guest runs."""
    reported_us: int
    """The same as reported by the command."""
    resumed_host_us: int
    """When the guest ran, since 1970."""
    steps: list[dict[str, Any]]
    """Entries of Rekindle's timeline."""


@dataclass(frozen=True)
class Filled:
    """The completed fill of a restored guest; `None`: not found in the pager's log."""

    fill_us: int
    demanded: int | None
    """Pages that the guest waited for."""
    background: int | None
    """Pages that were loaded in the background."""
    worst_us: int | None
    """The longest wait for a page."""


class RestoreEnvironment(ProtectEnvironment):
    """The environment of the restore benchmark: guests that crash, and are restored."""

    def knows_prepare(self) -> bool:
        """Returns whether the tested `rekindle restore` has the option `--prepare`."""
        command = [str(self.rekindle.binary), "restore", "--help"]
        help_text = subprocess.run(command, capture_output=True, text=True, check=True)
        return "--prepare" in help_text.stdout

    def qemus(self, name: str) -> list[int]:
        """Returns the pids of a VM's QEMUs in this run directory."""
        pids = []
        folder = str(self.rekindle.run_dir / name).encode() + b"/vmm-"
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if b"qemu-system" in line.split(b"\0", 1)[0] and folder in line:
                    pids.append(int(entry.name))
        return pids

    def crash(self, name: str) -> None:
        """Simulates the death of the guest's host: kills the QEMU, and removes Rekindle's files of the VM."""
        for pid in self.qemus(name):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30.0
        while self.qemus(name):
            if time.monotonic() > deadline:
                raise RekindleError(f"{name}: its QEMU does not end")
            time.sleep(0.005)
        self.rekindle.stop(name)

    def restore(self, name: str, store: Store, *options: str) -> Restored:
        """Restores a VM. The guest runs from the end of the step `resume` in Rekindle's own timeline."""
        timeline = self.rekindle.run_dir / name / "timeline.jsonl"
        started = time.time_ns() // 1000
        report = self.rekindle.call("restore", name, "--store", store.url, *store.options, *options)
        entries = [json.loads(line) for line in timeline.read_text().splitlines()]
        steps = [entry for entry in entries if entry["start_host_us"] + entry["us"] >= started]
        resumed = [step for step in steps if step["step"] == "resume"]
        if not resumed:
            raise RekindleError(f"restore {name}: its timeline has no step `resume`")
        end = resumed[-1]["start_host_us"] + resumed[-1]["us"]
        return Restored(restore_us=end - started, reported_us=report["us"], resumed_host_us=end, steps=steps)

    def wait_filled(self, name: str, since_host_us: int) -> Filled:
        """Waits until all memory of the guest is loaded."""
        fill, log = (self.rekindle.run_dir / name / file for file in ("fill.json", "pager.log"))
        deadline = time.monotonic() + FILL_DEADLINE_S
        while fill.exists():
            if time.monotonic() > deadline:
                raise RekindleError(f"{name}: its memory is not loaded within {FILL_DEADLINE_S:g} s")
            time.sleep(0.005)
        took_us = time.time_ns() // 1000 - since_host_us
        # The pager logs its result shortly after it has removed the record.
        while True:
            filled = _FILLED.search(log.read_text())
            if filled or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        demanded, worst_us, background = [int(number) for number in filled.groups()] if filled else [None, None, None]
        return Filled(fill_us=took_us, demanded=demanded, background=background, worst_us=worst_us)

    def resident_kib(self, name: str) -> int:
        """Returns the resident memory, in KiB, of all processes of this VM: QEMU and Rekindle's."""
        total = 0
        marks = (str(self.rekindle.run_dir / name).encode() + b"/", b"\0" + name.encode() + b"\0")
        environment = f"REKINDLE_RUN_DIR={self.rekindle.run_dir}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                line = (entry / "cmdline").read_bytes()
                binary = line.split(b"\0", 1)[0]
                ours = b"qemu-system" in binary or (
                    binary.endswith(b"rekindle") and environment in (entry / "environ").read_bytes()
                )
                if ours and any(mark in line for mark in marks):
                    rss = re.search(r"VmRSS:\s+(\d+)", (entry / "status").read_text())
                    total += int(rss[1]) if rss else 0
            except OSError:
                continue
        return total


environment = partial(environment_of, RestoreEnvironment)
"""Sets up the environment in the same way as topic `protect`."""
