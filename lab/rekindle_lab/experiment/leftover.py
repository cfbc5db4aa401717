"""What a run that was killed may have left beside its VM: a protector, a client, an ssh session."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from rekindle_lab.experiment.processes import with_variable


def end_processes(run_dir: Path, namespace: str) -> None:
    """End all that Rekindle commands of this run directory have started, and all in this network namespace.

    Both are a run's own: nobody else's process is found there. The VM is to be stopped before.
    """
    for pid in {*with_variable("REKINDLE_RUN_DIR", str(run_dir)), *_in_namespace(namespace)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _in_namespace(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split() if int(pid) != os.getpid()]
