"""Checkpoints of 46 MB: memory that a guest has written again since the last checkpoint, and that does not compress."""

import math
import time

from rekindle_bench.environment import MIB
from rekindle_lab.guests import Guest
from rekindle_lab.protector import Protector, protected
from rekindle_lab.rekindle import Rekindle
from rekindle_lab.stores import Store

COMMIT_BYTES = 46_000_000
"""Table I: size of a checkpoint of the kernel compilation every 10 s."""
PAGE_BYTES = 4096
COMMIT_AREA_MIB = math.ceil(math.ceil(COMMIT_BYTES / PAGE_BYTES) * PAGE_BYTES / MIB)
"""Memory that a guest writes before a checkpoint of `COMMIT_BYTES`."""


def first_commit(rekindle: Rekindle, guest: Guest, store: Store) -> None:
    """Fills the area with data that does not compress, and takes the first checkpoint, which has all memory."""
    guest.command(f"touch {COMMIT_AREA_MIB}M")
    with protected(rekindle, guest.name, store, "1h") as protector:
        protector.stop()


def commit_rewritten(rekindle: Rekindle, guest: Guest, store: Store) -> Protector:
    """Makes the guest write the area, and takes a checkpoint; returns the ended protector with its one event."""
    _rewrite(guest, COMMIT_AREA_MIB)
    # QEMU's write record covers the rewrite: the next protector's first checkpoint has the area alone.
    with protected(rekindle, guest.name, store, "1h") as protector:
        event = protector.of("checkpoint")[0]
        protector.stop()
        if event["full"]:
            raise RuntimeError("the protector did not continue from the last one's checkpoint")
        return protector


def _rewrite(guest: Guest, area_mib: int) -> None:
    """Makes the guest write the whole touched area again."""

    def written_pages() -> int:
        """Lets the guest write 400 MB/s, and returns how many pages it has written so far."""
        return int(guest.command("dirty 400").split()[1])

    first = written_pages()
    deadline = time.monotonic() + 120.0
    while written_pages() - first < area_mib * MIB // PAGE_BYTES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{guest.name}: has not written {area_mib} MiB within 120 s")
        time.sleep(0.05)
    guest.command("dirty 0")
