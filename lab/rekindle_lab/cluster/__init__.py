"""Drives the test bed `tests/cluster/bed`, and watches what happens in it.

The modules `counter`, `running`, `judge` and `timeline` need nothing but Python itself.
"""
