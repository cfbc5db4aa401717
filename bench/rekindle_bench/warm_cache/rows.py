"""Raw rows of the warm-cache benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

WAYS = ("warm-cache", "cold", "writeback", "none")
"""Ways to reboot a guest: `warm-cache` and `cold` with Rekindle's disk server, or cold with QEMU's own disk in one of
two cache modes."""


@dataclass(kw_only=True)
class Row:
    """One measurement. Names end in the unit."""

    case: str
    """`files` (rows of the cases `read`, `small`, `write`, `mmap`, `cloud`), `native` (also rows of the case `attic`),
    or the name of another case."""
    what: str
    """`read`, `write`, `mmap-read`, `mmap-write`, `bytes` (one byte per page), `tpch`, `http`, `memory`; `kill` (of a
    server: until a server serves again) and `verify` (data that was read and verified meanwhile)."""
    how: str
    """One of the `WAYS`. `cold-read` (for `tpch`): cold, and all files were read before the first run. `map`, `no-map`:
    with and without a block map. `server`, `qsd` (io_uring), `qsd-native`, `qsd-threads`: disk servers. `attic`:
    retained cache, into used buffers. `attic-fresh`: retained cache, into untouched memory."""
    limit: str
    """Limit of the disk: a name in the plan's limits, or `none`."""
    round: int
    at: int = 0
    """Index of the access: -1 is the last before the reboot, 1 the first after it; 0 without a reboot."""
    memory_mib: int | None = None
    block: int | None = None
    """Bytes per request."""
    bytes: int | None = None
    """Bytes moved. For `memory`, and for a first run of `tpch`: bytes from the retained cache."""
    us: int | None = None
    """Duration of the access, run or window; for `kill` see `what`."""
    requests: int | None = None
    cpu_us: int | None = None
    """Processor time of the server during the measurement."""
    second: int | None = None
    """For `http`: second since all services answered again, from 1. Before the reboot negative, up to -1."""
    ram_kib: int | None = None
    """Files of guest memory, including the retained cache, at the peak of the host's memory."""
    private_kib: int | None = None
    """Private memory of QEMU and disk server at the same peak."""
    code_kib: int | None = None
    """Part of `private_kib`: code that the emulation has translated."""
    cached_kib: int | None = None
    """Part of the disk image that the host caches at the end."""
    errors: int | None = None
    """Errors of the verification."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For `memory`: the steps of the reboot. For `tpch`: the queries. Each has `step` and `us` (its duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "warm-cache")
