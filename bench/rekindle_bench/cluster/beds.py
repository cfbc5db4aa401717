"""Test beds of the fail-over benchmark: a new one for each case, with a VM and a client."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_bench.environment import Environment, Setup
from rekindle_lab import guests
from rekindle_lab.cluster.bed import VM, Bed, BedError, bed
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
    _bed: Bed | None = None
    _number: int = 0

    @property
    def bed(self) -> Bed:
        """The running bed."""
        if self._bed is None:
            raise BedError("no bed is running")
        return self._bed

    def fresh(self, every: str = f"{EVERY_S:g}s", *, output_commit: bool = False, patience_s: float = PATIENCE) -> Bed:
        """Replaces the test bed with a new one, whose files are empty."""
        self._closing.close()
        self._bed = None
        self._number += 1
        folder = self.beds / str(self._number)
        folder.mkdir()
        self.log("a new bed")
        given = (self.root, self.rekindle.binary, self.qemu, self.micro, folder, every)
        self._bed = self._closing.enter_context(bed(*given, output_commit=output_commit, patience_s=patience_s))
        return self._bed

    def away(self) -> None:
        """Stops the bed, so that it does not disturb other measurements."""
        self._closing.close()
        self._bed = None

    def spare_bytes(self, node: str) -> int:
        """Returns the bytes that other nodes hold for the guest of `node`: processes, and files in run directories."""
        others = [pid for name in ("n1", "n2", "n3") if name != node and (pid := self.bed.pid(name)) is not None]
        return sum(_processes(pid) + _files(Path(f"/proc/{pid}/root/run/rekindle")) for pid in others)


def _processes(init: int) -> int:
    """Returns the memory of a node's processes that belong to the VM, in bytes."""
    inside = Path(f"/proc/{init}/ns/pid").readlink()
    total = 0
    for process in Path("/proc").iterdir():
        try:
            if not process.name.isdigit() or (process / "ns" / "pid").readlink() != inside:
                continue
            words = (process / "cmdline").read_bytes().split(b"\0")
            if VM.encode() not in words and not any(b"/run/rekindle/" in word for word in words):
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # the process has ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _files(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0


@contextmanager
def environment(setup: Setup) -> Iterator[BedEnvironment]:
    """Sets up the environment: folders of the test beds."""
    with setup.workspace(namespaces=()) as space, ExitStack() as closing:
        beds = space.disk / "beds"
        beds.mkdir()
        micro = guests.build(setup.root, "micro").folder
        yield setup.environment(BedEnvironment, space, micro=micro, beds=beds, _closing=closing)
