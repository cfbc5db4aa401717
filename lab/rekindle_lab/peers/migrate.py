"""QEMU's own migration of a running guest to another QEMU: the peer of `rekindle move`.

The source is the QEMU that Rekindle has started, so hardware, load and place are the same. The destination was started
before and listens over TCP on this machine's loopback. The bandwidth limit is off, to QEMU's advantage.

- `live`: `migrate`. QEMU stops the guest at the end, once it expects that sending the rest takes no longer than its
  downtime limit, 300 ms by default. So with a fast link QEMU stops the guest early, with much left to send.
- `live-20ms`, `live-2ms`: with that downtime limit. If the guest writes faster than that allows, the migration never
  ends.
- `non-live`: `stop`, `migrate`, then `cont` in the destination.

Guest-stopped time runs from the source's STOP event to the destination's RESUME event, by the host clock, as for
Rekindle.
"""

import socket
import time
from dataclasses import dataclass

from rekindle_lab.peers.cpr import PeerError
from rekindle_lab.peers.destination import (
    DEADLINE_S,
    Vm,
    destination_arguments,
    resume,
    running_destination,
    wait_completed,
)
from rekindle_lab.qmp import Qmp, QmpError

__all__ = ["LIVE", "Migrated", "NotConvergedError", "Vm", "destination_arguments", "migrate", "running_destination"]

CONVERGE_S = 60.0
"""Seconds after which a migration that has not stopped the guest counts as not converging."""
UNLIMITED_BYTES_PER_S = 1 << 50
"""Bandwidth limit of a migration, above that of any link: none."""
LIVE = {"live": 300, "live-20ms": 20, "live-2ms": 2}
"""Live migrations, with their downtime limits in ms."""


class NotConvergedError(PeerError):
    """The guest writes too fast for the downtime limit, and continues in the source."""


@dataclass(frozen=True)
class Migrated:
    """One migration. Times by the host clock are microseconds since 1970."""

    stop_host_us: int
    """When the source stopped the guest."""
    resume_host_us: int
    """When the destination resumed it."""
    total_us: int
    """From the command until the guest runs in the destination, with all of its memory."""

    @property
    def stopped_us(self) -> int:
        """Guest-stopped time in microseconds."""
        return self.resume_host_us - self.stop_host_us


def migrate(source: Qmp, target: Qmp, how: str) -> Migrated:
    """Migrates the guest from `source` to `target`, in one of the `LIVE` ways or `non-live`."""
    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        uri = f"tcp:127.0.0.1:{free_port.getsockname()[1]}"
    for qemu in (source, target):
        qemu.execute("migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]})
    downtime_limit = {"downtime-limit": LIVE[how]} if how in LIVE else {}
    source.execute("migrate-set-parameters", {"max-bandwidth": UNLIMITED_BYTES_PER_S, **downtime_limit})
    target.execute("migrate-incoming", {"uri": uri})
    source.forget_events()
    target.forget_events()
    started_us = time.time_ns() // 1000
    if how == "non-live":
        source.execute("stop")
    source.execute("migrate", {"uri": uri})
    try:
        stopped = source.wait_event("STOP", DEADLINE_S if how == "non-live" else CONVERGE_S)
    except QmpError as error:
        source.execute("migrate_cancel")
        if source.execute("query-status")["running"]:
            raise NotConvergedError(f"{how}: the guest was not stopped within {CONVERGE_S:g} s: {error}") from error
        raise
    if how == "non-live":
        wait_completed(target)
        resumed = resume(target)
    else:
        resumed = target.wait_event("RESUME", DEADLINE_S)
    return Migrated(stopped.host_us, resumed.host_us, total_us=resumed.host_us - started_us)
