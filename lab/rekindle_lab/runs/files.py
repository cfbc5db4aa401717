"""Writes files so that they are complete or absent after a crash."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that after a crash it has either all of `text` or its previous content."""
    new_path = path.with_name(path.name + ".new")
    with new_path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new_path.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
