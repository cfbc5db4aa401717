"""Ends what a killed run may have left in addition to its VM: a protector, a client, an ssh session."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from rekindle_lab.experiment.processes import with_variable


def end_processes(run_dir: Path, namespace: str) -> None:
    """Ends all processes of Rekindle commands for this run directory, and all in this network namespace.

    Both belong to the run alone, so no other process can be hit. The VM must have been stopped before.
    """
    for pid in {*with_variable("REKINDLE_RUN_DIR", str(run_dir)), *_in_namespace(namespace)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _in_namespace(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split() if int(pid) != os.getpid()]
