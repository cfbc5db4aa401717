"""Waits for a condition of another process or thread, with a deadline, so that a failing test ends."""

import time


def wait_until(condition, within_s=20):
    """Returns once `condition()` is true; fails after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)
