"""A file that grows: what is new in it. What was read before is not read again."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Tail:
    """Its whole lines, as they come."""

    path: Path
    _at: int = 0
    _inode: int = 0

    def lines(self) -> list[str]:
        """Those since the last time; none where there is no file. One in its place, or that was cut off, begins anew.

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
        whole = text[: text.rfind(b"\n") + 1]  # nothing of a line that is being written
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()
