"""Files that are complete or absent."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that after a crash it has either all of `text` or its previous content."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
