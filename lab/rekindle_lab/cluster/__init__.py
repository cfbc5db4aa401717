"""The test bed `cluster/bed` from Python, and what is watched in it.

The modules `counter`, `running`, `judge` and `timeline` need nothing but Python itself.
"""
