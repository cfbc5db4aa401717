"""Processes of a run, found by what only they have: a run starts others, which nobody has a list of."""

import os
from collections.abc import Callable
from pathlib import Path


def mentioning(text: str) -> list[int]:
    """Those whose environment or command line has `text`: all that works in a folder."""
    needle = text.encode()
    return _of(lambda folder: any(needle in (folder / file).read_bytes() for file in ("cmdline", "environ")))


def with_variable(name: str, value: str) -> list[int]:
    """Those whose environment has just this variable: who only speaks of it is another."""
    wanted = f"{name}={value}".encode()
    return _of(lambda folder: wanted in (folder / "environ").read_bytes().split(b"\0"))


def _of(fits: Callable[[Path], bool]) -> list[int]:
    """All but ourselves whose folder in /proc fits."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if fits(folder):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is not ours
    return found
