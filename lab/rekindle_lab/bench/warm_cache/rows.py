"""The raw rows of this topic."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_lab.bench.rows import read_rows

WAYS = ("warm-cache", "cold", "writeback", "none")
"""How a guest was rebooted: the two of Rekindle's, and cold with QEMU's own disk in two cache modes."""


@dataclass
class Row:
    """One thing that was measured. Names end in the unit."""

    case: str
    """As in the plan."""
    what: str
    """`read`, `write`, `mmap-read`, `mmap-write`, `bytes` (one a page), `tpch`, `http`, `memory`; `kill` (of a
    server: until it serves again) and `verify` (what was read and verified meanwhile)."""
    how: str
    """One of the `WAYS`; `cold-read` (of `tpch`: cold, and all was read before the first run);
    `map` and `no-map`; `server`, `qsd` (io_uring), `qsd-native` and `qsd-threads`; `attic` (into buffers) and
    `attic-fresh` (into memory that nobody has touched)."""
    limit: str
    """What the disk is held to: one of the plan's, or `none`."""
    round: int
    at: int = 0
    """Which access it is: -1 is the last before the reboot, 1 the first after it; 0 where there is none."""
    memory_mib: int | None = None
    block: int | None = None
    """Bytes of a request."""
    bytes: int | None = None
    """That were moved; of `memory`, and of a first run of `tpch`: that came out of the attic."""
    us: int | None = None
    requests: int | None = None
    cpu_us: int | None = None
    """Of a processor, used by the server meanwhile."""
    second: int | None = None
    """Of `http`: since the guest was well again, 1 first; before 0 until the reboot, the last is -1."""
    ram_kib: int | None = None
    """At the peak: the files of guest memory, the attic's too."""
    private_kib: int | None = None
    """At the same time: memory of their own of QEMU and server."""
    code_kib: int | None = None
    """Of that: what the emulation has translated."""
    cached_kib: int | None = None
    """What the host caches of the image, at the end."""
    errors: int | None = None
    """Of the verification."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path) -> pd.DataFrame:
    """The rows of a file. Numbers that are not there are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "warm-cache")
