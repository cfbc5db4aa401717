"""Reads the new lines of a growing file."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Tail:
    """The complete lines of a file, returned as they are appended."""

    path: Path
    _at: int = 0
    _inode: int = 0

    def lines(self) -> list[str]:
        """Returns the lines since the last call; none without a file. Reads a replaced or truncated file anew.

        Raises `OSError` for a file that cannot be read.
        """
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return []
        if now.st_ino != self._inode or now.st_size < self._at:
            self._at, self._inode = 0, now.st_ino
        if now.st_size == self._at:
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # omits a line that is still being written
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()
