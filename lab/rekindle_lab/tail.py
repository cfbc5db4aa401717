"""Reads the new lines of a growing file."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Tail:
    """The complete lines of a file, returned as they are appended."""

    path: Path
    _offset: int = 0
    _inode: int = 0

    def skip(self) -> None:
        """Skips the present content."""
        stat = self.path.stat()
        self._offset, self._inode = stat.st_size, stat.st_ino

    def lines(self) -> list[str]:
        """Returns the lines since the last call; none without a file. Reads a replaced or truncated file anew.

        Raises `OSError` for a file that cannot be read.
        """
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return []
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._offset, self._inode = 0, stat.st_ino
        if stat.st_size == self._offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole_lines = text[: text.rfind(b"\n") + 1]  # omits a line that is still being written
        self._offset += len(whole_lines)
        return whole_lines.decode(errors="replace").splitlines()
