"""Finds the processes of a run by its environment or command lines, since a run starts processes that no list has."""

import os
from collections.abc import Callable
from pathlib import Path


def mentioning(text: str) -> list[int]:
    """Returns the processes whose environment or command line contains `text`, such as the path of a run's folder."""
    needle = text.encode()
    return _pids_where(lambda folder: any(needle in (folder / file).read_bytes() for file in ("cmdline", "environ")))


def with_variable(name: str, value: str) -> list[int]:
    """Returns the processes whose environment has exactly this variable; a mere mention of it does not count."""
    wanted = f"{name}={value}".encode()
    return _pids_where(lambda folder: wanted in (folder / "environ").read_bytes().split(b"\0"))


def _pids_where(fits: Callable[[Path], bool]) -> list[int]:
    """Returns all processes but this one whose folder in /proc satisfies `fits`."""
    pids = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if fits(folder):
                pids.append(int(folder.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return pids
