"""Raw rows of the warm-cache benchmark."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rekindle_bench.rows import read_rows

WAYS = ("warm-cache", "cold", "writeback", "none")
"""Ways to reboot a guest.

- `warm-cache`: Rekindle's disk server retains the guest's page cache.
- `cold`: with Rekindle's disk server, without a retained cache.
- `writeback`, `none`: cold, with QEMU's own disk in this cache mode.
"""
SANDBOXES_ON, SANDBOXES_OFF = "on", "off"
"""The guests of case `sandboxes`: with all sandboxes, and without any."""


@dataclass(kw_only=True)
class Row:
    """One measurement.

    Names end in the unit. A field is empty if a measurement of its kind has no such value.
    """

    case: str
    """`files` (rows of the cases `read`, `small`, `write`, `mmap`, `cloud`), `native` (also rows of the case `attic`),
    or the name of another case."""
    what: str
    """Kind of the measurement.

    - `read`, `write`, `mmap-read`, `mmap-write`: access to a whole file.
    - `bytes`: access to one byte of each page of a file.
    - `tpch`: one run of all queries. `http`: one second of a web server.
    - `memory`: use of the host's memory during a reboot.
    - `kill`: of a disk server, until a server serves again. `verify`: data that was read and verified meanwhile.
    - For `sandboxes`: `vmm` and `protect` are guest-stopped times of a warm reboot of the VMM and of a checkpoint;
      `protect-commit` is the duration of that checkpoint with its commit; `restore` is from the command until the guest
      runs; `fill` is from then until all of its memory is loaded; `disk` and `disk-write` are random reads of a disk,
      and random writes with a flush after each.
    """
    how: str
    """Way of the reboot, one of `WAYS`; or what is compared without a reboot.

    - `cold-read` (for `tpch`): cold, and all files were read before the first run.
    - `map`, `no-map`: with and without a block map.
    - `server`, `qsd` (io_uring), `qsd-native`, `qsd-threads`: disk servers.
    - `attic`, `attic-fresh`: reads from the retained cache, into used buffers and into untouched memory.
    - `on`, `off`: with all sandboxes, and without any.
    """
    limit: str
    """Limit of the disk: a name in the plan's limits, or `none`."""
    round: int
    """Number of the repetition, from 0."""
    at: int = 0
    """Index of the access: -1 is the last before the reboot, 1 the first after it; 0 without a reboot."""
    memory_mib: int | None = None
    """RAM of the guest, in MiB."""
    block: int | None = None
    """Size of a request, in bytes."""
    bytes: int | None = None
    """Bytes read or written. For `memory`, and for a first run of `tpch`: bytes from the retained cache."""
    us: int | None = None
    """Duration of the measurement, in microseconds."""
    requests: int | None = None
    """Number of requests in the measurement."""
    cpu_us: int | None = None
    """Processor time of the disk server during the measurement, in microseconds."""
    second: int | None = None
    """For `http`: number of the second since all services answered again, from 1. Before the reboot negative: -1 is the
    last second before it."""
    ram_kib: int | None = None
    """For `memory`: files of guest memory and retained cache at the peak of the host's memory, in KiB."""
    private_kib: int | None = None
    """For `memory`: private memory of QEMU and disk server at this peak, in KiB."""
    code_kib: int | None = None
    """For `memory`: part of `private_kib` that is code which the emulation has translated, in KiB."""
    cached_kib: int | None = None
    """For `memory`: part of the disk image that the host caches at the end, in KiB."""
    errors: int | None = None
    """For `verify`: number of errors."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """For `memory`, `vmm`, `protect` and `restore`: the steps. For `tpch`: the queries. Each has `step` and `us` (its
    duration)."""


def read(path: Path) -> pd.DataFrame:
    """Reads the rows of a file. Missing numbers are NaN; `steps` stays JSON text."""
    return read_rows(path, Row, "warm-cache")
