"""What a run that was killed may have left beside its VM: a protector, a client, an ssh session."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


def end_processes(run_dir: Path, namespace: str) -> None:
    """End all that Rekindle commands of this run directory have started, and all in this network namespace.

    Both are a run's own: nobody else's process is found there. The VM is to be stopped before.
    """
    for pid in {*_of_run_directory(run_dir), *_in_namespace(namespace)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _of_run_directory(run_dir: Path) -> list[int]:
    wanted = f"REKINDLE_RUN_DIR={run_dir}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # it has ended, or is not ours
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _in_namespace(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split() if int(pid) != os.getpid()]
