"""A host with invented guests: run directories as Rekindle writes them, without a QEMU.

One process stands for the QEMU of every guest. This process holds the locks that a protector and `rekindle watch` would
hold. `rekindle metrics` only reads files, locks and `/proc`, so that it takes these guests for real ones.
"""

import fcntl
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rekindle_lab.machine import find_root

STATE = "crates/metrics/tests/state.json"
"""The state of a guest, in the folder of the project."""
PAUSE_BOUNDS_US = [500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000]
REPLACEMENT = [
    ("prepare", "check what it needs", 1_900),
    ("prepare", "start the new QEMU", 148_000),
    ("prepare", "open its disks", 12_400),
    ("suspend", "stop", 700),
    ("suspend", "save devices", 6_200),
    ("renew", "hand over", 1_100),
    ("resume", "load", 9_800),
    ("resume", "resume", 400),
    ("settle", "end the old QEMU", 41_000),
]


def _state() -> dict[str, Any]:
    root = find_root(Path(__file__).resolve())
    if root is None:
        raise FileNotFoundError(f"{STATE}: {__file__} is not in a clone of the project")
    return json.loads((root / STATE).read_text())


def _uptime_ms() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1000)


def _write(path: Path, content: str) -> None:
    """Replaces a file as a whole, as Rekindle does."""
    new = path.with_name(path.name + ".new")
    new.write_text(content)
    new.rename(path)


class Guest:
    """A guest that runs; protected if it has an interval."""

    def __init__(self, folder: Path, qemu: subprocess.Popen[bytes], every_ms: int | None) -> None:
        """Makes the run directory `folder`, and holds the locks in it."""
        self.folder, self.every_ms = folder, every_ms
        self.locks: dict[str, TextIO] = {}
        """Locks that are held, by name of the file."""
        self.number = 0
        """Number of the newest checkpoint."""
        self.pauses: list[int] = []
        """Pauses of all checkpoints in microseconds."""
        folder.mkdir(parents=True)
        state = _state()
        started = Path("/proc", str(qemu.pid), "stat").read_text().rpartition(")")[2].split()[19]
        state["vmm"] |= {"pid": qemu.pid, "started": int(started), "binary": "/usr/bin/sleep"}
        _write(folder / "state.json", json.dumps(state))
        self.hold("watch.lock")
        if every_ms:
            self.hold("protection.lock")

    @property
    def is_protected(self) -> bool:
        """Whether a protector seems to run."""
        return "protection.lock" in self.locks

    def hold(self, name: str) -> None:
        """Holds a lock."""
        self.locks[name] = (self.folder / name).open("w")
        fcntl.flock(self.locks[name], fcntl.LOCK_EX)

    def release(self, name: str) -> None:
        """Releases a lock, as if its process had ended."""
        self.locks.pop(name).close()

    def commit(self, pause_us: int, age_ms: int = 0, **counters: Any) -> None:  # noqa: ANN401
        """Commits a checkpoint, as a protector records it."""
        self.number += 1
        self.pauses.append(pause_us)
        progress = {
            "store": "/var/lib/rekindle/store",
            "pid": 1,
            "policy": "cow",
            "collected": self.number,
            "committed": self.number,
            "committed_at_ms": _uptime_ms() - age_ms,
            "epoch": 1,
        }
        _write(self.folder / "protect.json", json.dumps(progress))
        self.count(**counters)

    def count(self, **counters: Any) -> None:  # noqa: ANN401
        """Writes the counters of the protector."""
        buckets = [[bound, 0] for bound in PAUSE_BOUNDS_US]
        for pause in self.pauses:
            next(bucket for bucket in buckets if pause <= bucket[0])[1] += 1
        pauses = {"buckets": buckets, "above": 0, "sum_us": sum(self.pauses)}
        space = {"size": 1 << 40, "available": 700 << 30}
        record = {"every_ms": self.every_ms, "checkpoints": self.number, "pauses": pauses, "store_space": space}
        _write(self.folder / "protect-counters.json", json.dumps(record | counters))

    def replace_qemu(self, minutes_ago: int = 0, operation: str = "replace-qemu --how warm") -> None:
        """Records a replacement of the QEMU."""
        at_us = int(time.time() * 1e6) - minutes_ago * 60_000_000
        mono_ns = time.monotonic_ns()
        with (self.folder / "timeline.jsonl").open("a") as file:
            for phase, step, us in REPLACEMENT:
                entry = {"vm": self.folder.name, "operation": operation, "phase": phase, "step": step}
                entry |= {"start_host_us": at_us, "start_mono_ns": mono_ns, "us": us}
                file.write(json.dumps(entry) + "\n")
                at_us, mono_ns = at_us + us, mono_ns + us * 1000


class InventedHost:
    """A folder with run directories, and the process in place of QEMUs. Ended by `with`."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder."""
        self.folder = folder
        self.guests: dict[str, Guest] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "InventedHost":
        self.qemu = subprocess.Popen(["sleep", "infinity"])
        return self

    def __exit__(self, *_: object) -> None:
        for guest in self.guests.values():
            for lock in guest.locks.values():
                lock.close()
        self.qemu.kill()
        self.qemu.wait()

    def add(self, name: str, every_ms: int | None = None) -> Guest:
        """Adds a guest, protected if it has an interval."""
        self.guests[name] = Guest(self.folder / name, self.qemu, every_ms)
        return self.guests[name]

    def populate(self, count: int) -> None:
        """Adds guests of which most are protected, and some need attention."""
        services = ["web", "db", "mail", "cache", "build", "queue", "files", "dns"]
        for index in range(count):
            every_ms = None if index % 9 == 4 else 1000
            guest = self.add(f"{services[index % len(services)]}-{index:03}", every_ms)
            if every_ms:
                guest.commit(3_000 + 137 * (index % 29))
            if index % 3 == 0:
                guest.replace_qemu(minutes_ago=7 * index)
            if every_ms and index % 41 == 5:
                guest.commit(4_000, age_ms=45_000)
            if every_ms and index % 53 == 7:
                guest.count(is_store_away=True)
            if index % 67 == 9:
                guest.release("watch.lock")
            if every_ms and index % 71 == 10:
                guest.release("protection.lock")

    @contextmanager
    def protecting(self, every_s: float = 1.0, *, all_change: bool = False) -> Iterator[None]:
        """Lets every protected guest commit every `every_s` seconds, spread over that time.

        `all_change`: for every other guest, a replacement of the QEMU is recorded as often.
        """
        guests = [guest for guest in self.guests.values() if guest.is_protected or all_change]
        stop = threading.Event()

        def change() -> None:
            at_s = time.monotonic()
            while True:
                for guest in guests:
                    at_s += every_s / len(guests)
                    if stop.wait(max(0.0, at_s - time.monotonic())):
                        return
                    if guest.is_protected:
                        guest.commit(3_000 + 997 * (guest.number % 7))
                    else:
                        guest.replace_qemu()

        with ThreadPoolExecutor(1) as executor:
            changes = executor.submit(change)
            try:
                yield
            finally:
                stop.set()
            changes.result()
