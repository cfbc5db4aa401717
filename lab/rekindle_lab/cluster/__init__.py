"""Drives the test bed `tests/cluster/bed`, and watches its nodes and guests.

The modules `counter`, `running`, `judge`, `events`, `tail` and `timeline` need only Python itself.
"""
