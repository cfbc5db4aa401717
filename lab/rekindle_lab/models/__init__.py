"""Models of RootHammer's sections 3.2 and 6: availability and throughput by the way to renew the VMM.

- Input: `parameters` (measured durations, and the timers), `moves` (measured moves of guests to another host).
- Models: `availability` and `throughput` (equations 1 to 6), `crossing` (the points at which one technique overtakes
  another), `simulation` (the same timers, event by event).
- Output: `figures` (9, 10, 16), `command`.
"""
