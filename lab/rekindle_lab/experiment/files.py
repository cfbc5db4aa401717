"""Files that are whole or not there."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file so that after a crash it is there with all of `text`, or as it was before."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
