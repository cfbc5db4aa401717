"""Drives the test bed `tests/cluster/bed` (nodes of a Pacemaker cluster, with a VM), and watches its nodes and guests.

The guest counts ticks. A fail-over restores it on another node from a checkpoint, so that its count is set back.

- `bed` starts the test bed and injects faults; `events` reads what it has done.
- `counter` is a client that requests the guest's count; `running` records which QEMU runs the guest, and when.
- `judge` decides from both records whether a run was correct; `timeline` draws a fail-over.

All but `bed` need only Python itself.
"""
