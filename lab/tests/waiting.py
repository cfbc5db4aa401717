"""Waiting for a condition."""

import time


def wait_until(condition, within_s=20):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.02)
