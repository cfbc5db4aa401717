"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

WAYS = ("warm-cache", "cold", "writeback", "none")
"""How a guest was rebooted: Rekindle's two ways, and cold with QEMU's own disk in two cache modes."""


@dataclass
class Row:
    """One measurement. Names end in the unit."""

    case: str
    """As in the plan."""
    what: str
    """`read`, `write`, `mmap-read`, `mmap-write`, `bytes` (one per page), `tpch`, `http`, `memory`; `kill` (of a
    server: until it serves again) and `verify` (what was read and verified meanwhile)."""
    how: str
    """One of the `WAYS`; `cold-read` (of `tpch`: cold, and all was read before the first run);
    `map` and `no-map`; `server`, `qsd` (io_uring), `qsd-native` and `qsd-threads`; `attic` (retained cache, into used
    buffers) and `attic-fresh` (the same into untouched memory)."""
    limit: str
    """The limit of the disk: one of the plan's, or `none`."""
    round: int
    at: int = 0
    """Index of the access: -1 is the last before the reboot, 1 the first after it; 0 where there is none."""
    memory_mib: int | None = None
    block: int | None = None
    """Bytes per request."""
    bytes: int | None = None
    """Bytes moved; of `memory`, and of a first run of `tpch`: bytes from the retained cache."""
    us: int | None = None
    requests: int | None = None
    cpu_us: int | None = None
    """Processor time of the server meanwhile."""
    second: int | None = None
    """Of `http`: second since the guest was well again, from 1; before 0 until the reboot, the last is -1."""
    ram_kib: int | None = None
    """At the peak: the files of guest memory, including the retained cache."""
    private_kib: int | None = None
    """At the same time: private memory of QEMU and server."""
    code_kib: int | None = None
    """Part of that: code that the emulation has translated."""
    cached_kib: int | None = None
    """Part of the image in the host's cache, at the end."""
    errors: int | None = None
    """Errors of the verification."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "warm-cache")
