"""The machine of an experiment: the project's folder, the cache, installed versions, signals."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

_TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def find_root(start: Path) -> Path | None:
    """Returns the project's folder: the nearest parent that has tests/images/build."""
    return next((folder for folder in [start, *start.parents] if (folder / "tests/images/build").exists()), None)


def cache() -> Path:
    """Returns the cache: a folder on a real disk that is kept between runs."""
    return Path(os.environ.get("REKINDLE_CACHE") or Path.home() / ".cache" / "rekindle")


def machine_versions() -> dict[str, str]:
    """Returns the versions of the machine's software and of the lab, as far as they matter to a figure."""
    import matplotlib
    import numpy
    import pandas
    import scipy

    model_name = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    cpu = model_name[1].strip() if model_name else platform.machine()
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])  # its first line is MemTotal
    cores = _output("nproc")
    return {
        "linux": platform.release(),
        "cpu": f"{cores} x {cpu}",
        "memory": f"{memory_kib / 2**20:.1f} GiB",
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "pandas": pandas.__version__,
        "matplotlib": matplotlib.__version__,
        **({"libvirt": _output("virsh", "--version")} if shutil.which("virsh") else {}),
    }


def qemu_version(binary: str) -> str:
    """Returns the first line of a QEMU's `--version`."""
    return _output(binary, "--version").splitlines()[0]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def interrupt_on_signals(name: str) -> None:
    """Makes termination signals raise `KeyboardInterrupt`, so that everything made by this process is removed.

    Only the first signal raises: a second signal does not interrupt the removal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for ending in _TERMINATION_SIGNALS:
            signal.signal(ending, signal.SIG_IGN)
        print(f"{name}: interrupted; taking everything down", file=sys.stderr, flush=True)
        raise KeyboardInterrupt

    for ending in _TERMINATION_SIGNALS:
        signal.signal(ending, interrupt)
