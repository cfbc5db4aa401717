"""Test beds of the fail-over benchmark: a new one for each case, with a VM and a client."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_bench.environment import Environment, Setup
from rekindle_lab import guests
from rekindle_lab.cluster.bed import NODES, VM, Bed, BedError, bed
from rekindle_lab.cluster.counter import PATIENCE

EVERY_S = 1.0
"""Checkpoint interval in s."""
GUEST_BYTES = 96 << 20
"""RAM of the guest: the default of `tests/cluster/bed`."""


@dataclass
class BedEnvironment(Environment):
    """The environment of the fail-over benchmark: one test bed at a time."""

    micro: Path
    """Image of the guest."""
    beds: Path
    """Folder of the test beds, on a real disk."""
    _closing: ExitStack
    """Stops the running bed."""
    _bed: Bed | None = None
    _number: int = 0
    """Number of beds so far; names the folder of the next one."""

    @property
    def bed(self) -> Bed:
        """The running bed."""
        if self._bed is None:
            raise BedError("no bed is running")
        return self._bed

    def fresh(self, every: str = f"{EVERY_S:g}s", *, output_commit: bool = False, patience_s: float = PATIENCE) -> Bed:
        """Replaces the test bed with a new one, whose files are empty."""
        self.stop_bed()
        self._number += 1
        folder = self.beds / str(self._number)
        folder.mkdir()
        self.log("a new bed")
        binary, settings = self.rekindle.binary, {"output_commit": output_commit, "patience_s": patience_s}
        started = bed(self.root, binary, self.qemu, self.micro, folder, every, **settings)
        self._bed = self._closing.enter_context(started)
        return self._bed

    def stop_bed(self) -> None:
        """Stops the bed, so that it does not disturb other measurements."""
        self._closing.close()
        self._bed = None

    def spare_bytes(self, node: str) -> int:
        """Returns the bytes that other nodes hold for the guest of `node`: processes, and files in run directories."""
        others = [pid for name in NODES if name != node and (pid := self.bed.pid(name)) is not None]
        return sum(_process_bytes(pid) + _file_bytes(Path(f"/proc/{pid}/root/run/rekindle")) for pid in others)


def _process_bytes(init: int) -> int:
    """Returns the memory of a node's processes that belong to the VM. `init`: a process of the node."""
    pid_namespace = Path(f"/proc/{init}/ns/pid").readlink()
    total = 0
    for process in Path("/proc").iterdir():
        try:
            if not process.name.isdigit() or (process / "ns" / "pid").readlink() != pid_namespace:
                continue
            words = (process / "cmdline").read_bytes().split(b"\0")
            if VM.encode() not in words and not any(b"/run/rekindle/" in word for word in words):
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # the process has ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


@contextmanager
def environment(setup: Setup) -> Iterator[BedEnvironment]:
    """Sets up the environment: folders of the test beds."""
    with setup.workspace(namespaces=()) as space, ExitStack() as closing:
        beds = space.disk / "beds"
        beds.mkdir()
        micro = guests.build(setup.root, "micro").folder
        yield setup.environment(BedEnvironment, space, micro=micro, beds=beds, _closing=closing)
