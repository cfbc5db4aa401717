"""Shared by the tests of guest images and of the emulated host: an expectation, and waiting for a condition."""

import time

POLL_S = 0.02


class Failed(Exception):
    """A check failed. The text has the expected and the actual result."""


def expect(condition, what):
    """Raises `Failed` unless the condition holds."""
    if not condition:
        raise Failed(what)


def wait_for(probe, what, deadline):
    """Polls `probe` until it returns a true value, and returns that value; fails with `what` at the deadline."""
    end = time.monotonic() + deadline
    while True:
        answer = probe()
        if answer:
            return answer
        expect(time.monotonic() < end, f"{what}: not within {deadline} s")
        time.sleep(POLL_S)
