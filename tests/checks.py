"""What the tests of guest images and of the emulated host share: an expectation, and waiting for a condition."""

import time

POLL_S = 0.02


class Failed(Exception):
    """What a check expected and what it got."""


def expect(condition, what):
    """Raises `Failed` unless the condition holds."""
    if not condition:
        raise Failed(what)


def wait_for(probe, what, deadline):
    """Returns the first true answer of `probe`."""
    end = time.monotonic() + deadline
    while True:
        answer = probe()
        if answer:
            return answer
        expect(time.monotonic() < end, f"{what}: not within {deadline} s")
        time.sleep(POLL_S)
