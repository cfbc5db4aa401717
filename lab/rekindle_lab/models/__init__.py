"""Models of RootHammer's sections 3.2 and 6: what a way to renew the VMM means for availability and throughput.

`parameters` (what was measured, and the timers), `availability` and `throughput` (equations 1 to 6), `crossing` (where
one technique overtakes another), `simulation` (the same timers, event by event), `figures` (9, 10, 16), `command`.
"""
