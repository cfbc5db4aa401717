"""The folders and the network namespaces in which a run works. All of them are removed, however the run ends.

A run creates them with `Workspace.created`. Their names (`leftovers`) are recorded before, so that after a kill the
next session removes them with `Workspace.from_leftovers(...).remove()`. The layout:

    WORK/                     on a tmpfs
      ram/                    a tmpfs for guest RAM
      RUN_DIR/                run directories of Rekindle, such as `run`
        VM/state.json         the record of a VM
        .NAME/                folders of Rekindle itself
    DISK/                     on a real disk
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rekindle_lab import netns
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.runs.processes import mentioning, with_variable

VM_RECORDS = ("state.json", "operation.json")
"""Files of which a VM's folder in a run directory has at least one."""
VM_FOLDERS = "*/[!.]*"
"""Pattern of the folders that may be of VMs, in `Workspace.work`: RUN_DIR/VM, without Rekindle's own (.NAME)."""
NO_SUCH_VM = "there is no VM"
"""Part of the error of `rekindle stop` for a VM that has ended meanwhile."""


@dataclass(frozen=True)
class Workspace:
    """The folders and network namespaces of one run."""

    binary: Path
    """The `rekindle` binary of the run's VMs."""
    work: Path
    """Folder on a tmpfs, as run directories are; its path is short, since it holds unix sockets."""
    disk: Path
    """Folder on a real disk, for disks, saved RAM and stores."""
    namespaces: tuple[str, ...]
    """Names of the network namespaces."""

    @property
    def ram(self) -> Path:
        """A tmpfs for guest RAM."""
        return self.work / "ram"

    @property
    def leftovers(self) -> dict[str, Any]:
        """Names of everything that a kill would leave behind, as JSON for `from_leftovers`."""
        return {"netns": list(self.namespaces), "work": str(self.work), "disk": str(self.disk)}

    @classmethod
    def from_leftovers(cls, binary: Path, leftovers: dict[str, Any]) -> Self:
        """Returns the workspace of a run from the names recorded before it started. `netns` is one name or a list."""
        names = leftovers["netns"]
        namespaces = (names,) if isinstance(names, str) else tuple(names)
        return cls(binary, work=Path(leftovers["work"]), disk=Path(leftovers["disk"]), namespaces=namespaces)

    @contextmanager
    def created(self) -> Iterator[Self]:
        """Creates the folders and namespaces; removes them at the end."""
        try:
            self.ram.mkdir(parents=True)
            self.disk.mkdir(parents=True)
            tmpfs = ["mount", "-t", "tmpfs", "-o", "size=90%,mode=0700", "rekindle-lab", self.ram]
            subprocess.run(tmpfs, check=True, capture_output=True)
            for name in self.namespaces:
                netns.add(name)
            yield self
        finally:
            self.remove()

    def _stop_vms(self) -> None:
        """Stops the VMs of all run directories in the workspace.

        Raises `RekindleError` for a VM that cannot be stopped while processes of the run live: they may use its files.
        Without such processes only the files of the VM are left, and they can be removed.
        """
        for vm_folder in list(self.work.glob(VM_FOLDERS)):
            if not any((vm_folder / record).exists() for record in VM_RECORDS):
                continue
            try:
                Rekindle(self.binary, run_dir=vm_folder.parent).stop(vm_folder.name)
            except (RekindleError, subprocess.TimeoutExpired) as error:
                has_ended = NO_SUCH_VM in str(error)
                if not has_ended and mentioning(str(self.work)):
                    raise RekindleError(f"{self.work}: processes of a killed run cannot be ended: {error}") from error

    def remove(self) -> None:
        """Stops VMs, ends processes that a kill has left, and removes folders and namespaces. May be called again.

        Raises `RekindleError` if a VM cannot be stopped; then removes nothing.
        """
        self._stop_vms()
        folders = self.work.glob("*/") if self.work.exists() else []
        for folder in folders:
            end_processes(with_variable("REKINDLE_RUN_DIR", str(folder)))
        for name in self.namespaces:
            end_processes(_in_namespace(name))
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["umount", "-l", self.ram], capture_output=True, check=False)
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.rmtree(self.disk, ignore_errors=True)


def end_processes(pids: list[int]) -> None:
    """Kills processes; ignores those that have ended already."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _in_namespace(namespace: str) -> list[int]:
    completed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in completed.stdout.split() if int(pid) != os.getpid()]
