"""Samples the host's memory for a guest every 50 ms, in a background thread: `Watch`, at the end."""

import re
import subprocess
import threading
import time
from pathlib import Path

EVERY_S = 0.05
"""Seconds between two samples."""
SELDOM_S = 1.0
"""Seconds between two slow samples: the list of processes, and the code that the emulation has translated."""


def processes(mark: str) -> list[int]:
    """Returns the QEMUs and disk servers that have `mark`, such as the name of a VM, in their command line."""
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_server = words[0].endswith(b"rekindle") and b"serve" in words[1:3]
        if (b"qemu-system" in words[0] or is_server) and any(mark.encode() in word for word in words):
            pids.append(int(entry.name))
    return pids


def files_in(pids: list[int], device: int) -> int:
    """Returns the bytes of all files on a file system that these processes have open. Counts unlinked files, too."""
    sizes: dict[int, int] = {}
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                status = descriptor.stat()
                if status.st_dev == device:
                    sizes[status.st_ino] = status.st_blocks * 512  # the unit of st_blocks
        except OSError:
            continue
    return sum(sizes.values())


def private_kib(pid: int) -> int:
    """Returns the private memory of a process in KiB."""
    try:
        rss_anon = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(rss_anon[1]) if rss_anon else 0


def code_kib(pid: int) -> int:
    """Returns the KiB in mappings that are writable and executable: code that an emulation has translated."""
    total, is_counted = 0, False
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_counted = line.split()[1].startswith("rwx")
        elif is_counted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def cached_kib(path: Path) -> int:
    """Returns the KiB of a file that the host caches."""
    result = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)], capture_output=True, text=True, check=True
    )
    return int(result.stdout.strip() or 0) // 1024


class Watch:
    """Samples until the body has ended; then `ram_kib`, `private_kib` and `code_kib` are those of the peak.

    The peak is the largest sum of RAM files and private memory without translated code.
    """

    def __init__(self, mark: str, ram_dir: Path) -> None:
        """`mark`: see `processes`. `ram_dir`: the folder of guest memory."""
        self.ram_kib = self.private_kib = self.code_kib = 0
        self._mark, self._device = mark, ram_dir.stat().st_dev
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        next_slow_sample, pids, code = 0.0, [], 0
        while not self._stopping.wait(EVERY_S):
            if time.monotonic() > next_slow_sample:
                pids = processes(self._mark)
                code = sum(code_kib(pid) for pid in pids)
                next_slow_sample = time.monotonic() + SELDOM_S
            ram, private = files_in(pids, self._device) // 1024, sum(private_kib(pid) for pid in pids)
            if ram + private - code > self.ram_kib + self.private_kib - self.code_kib:
                self.ram_kib, self.private_kib, self.code_kib = ram, private, code

    def __enter__(self) -> "Watch":
        """Starts sampling."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends sampling."""
        self._stopping.set()
        self._thread.join()
