"""Runs `rekindle protect` as a child process of an experiment, and records its events and its resource use.

A protector takes checkpoints of a running guest and commits them to a store. It prints an event as a JSON line for
each: `{"event": "checkpoint", "number": 7, ...}`. `protected` runs one while a body runs; `detach` ends the protection.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.stores import Store

START_DEADLINE_S = 120.0
"""Deadline for an event, such as the first checkpoint."""
END_DEADLINE_S = 300.0


@dataclass(frozen=True)
class ResourceUse:
    """Resource use of a protector process."""

    cpu_us: int
    peak_kib: int
    """Peak resident memory of the process."""


class Protector:
    """A protector of one VM, with all events that it has reported."""

    def __init__(
        self, rekindle: Rekindle, name: str, store: Store, every: str, policy: str | None = None, *options: str
    ) -> None:
        """Starts a protector, with a checkpoint `every` ("2s"); without `policy`, by Rekindle's default."""
        command = [str(rekindle.binary), "--json", "protect", name, "--store", store.url, *store.options]
        command += ["--create-store", "--every", every, *(["--policy", policy] if policy else []), *options]
        self._command = command
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._ended = False
        self._errors: list[str] = []
        self._peak_kib = 0
        self._process = subprocess.Popen(
            command,
            env=rekindle.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read_events, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._sample_peak()
                with self._changed:
                    self.events.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _sample_peak(self) -> None:
        """Samples the peak resident memory. `wait4` cannot be used, since its value starts with the parent's."""
        with suppress(OSError):
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self._process.pid}/status").read_text())
            self._peak_kib = int(peak[1]) if peak else self._peak_kib

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors += list(self._process.stderr)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Returns the events of `kind` so far."""
        with self._changed:
            return [event for event in self.events if event.get("event") == kind]

    def wait(self, kind: str, count: int = 1, timeout: float = START_DEADLINE_S) -> list[dict[str, Any]]:
        """Returns the events of `kind` once there are `count` of them. Raises if the protector ends before."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                events = [event for event in self.events if event.get("event") == kind]
                if len(events) >= count:
                    return events
                seconds_left = deadline - time.monotonic()
                if self._ended or seconds_left <= 0:
                    problem = "ended" if self._ended else f"gave no {kind} number {count} within {timeout:g} s"
                    output = "".join(self._errors)[-2000:].strip() or "(nothing)"
                    raise RekindleError(f"{' '.join(self._command[1:])}: {problem}; its output: {output}")
                self._changed.wait(seconds_left)

    def stop(self) -> ResourceUse:
        """Ends the protector, and waits for its end. The write tracking stays in QEMU."""
        if self._process.returncode is None:
            self._sample_peak()
            self._process.send_signal(signal.SIGINT)
        return self.join()

    def join(self, timeout: float = END_DEADLINE_S) -> ResourceUse:
        """Waits until the protector has ended by itself, and returns its resource use."""
        deadline = time.monotonic() + timeout
        while True:
            pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                self.kill()
                raise RekindleError(f"{' '.join(self._command[1:])}: does not end within {timeout:g} s")
            time.sleep(0.005)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        for thread in self._threads:
            thread.join()
        if self._process.returncode not in (0, 1):
            raise RekindleError(f"{' '.join(self._command[1:])}: {''.join(self._errors)[-2000:]}")
        return ResourceUse(int((usage.ru_utime + usage.ru_stime) * 1e6), self._peak_kib)

    @property
    def returncode(self) -> int | None:
        """Exit status of the protector, once it has ended."""
        return self._process.returncode

    def kill(self) -> None:
        """Kills the protector if it still runs."""
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()


@contextmanager
def protected(
    rekindle: Rekindle, name: str, store: Store, every: str, policy: str | None = None, *options: str
) -> Iterator[Protector]:
    """Runs a protector while the body runs. The first, full checkpoint is committed when the body starts."""
    protector = Protector(rekindle, name, store, every, policy, *options)
    try:
        protector.wait("checkpoint")
        yield protector
        if protector.returncode is None:
            protector.stop()
    finally:
        protector.kill()


def detach(rekindle: Rekindle, name: str, store: Store, policy: str | None = None) -> None:
    """Takes a last checkpoint and removes the tracking in QEMU, which an ended protector leaves for the next one."""
    if policy != "cow":  # the protection of `cow` ends with the protector's process
        policy_option = ["--policy", policy] if policy else []
        rekindle.call("protect", name, "--store", store.url, *store.options, "--count", "1", *policy_option)
