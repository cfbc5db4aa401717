"""What has been done: `runs.jsonl`, a line for each finished attempt, and `begun.jsonl`, a line before each.

A run counts when its line is on disk, whole. Killed before that, it is done again; killed after, it is not. A line that
was cut off, by a kill or a full disk, is the last one: it is taken off when the ledger is opened. Two at once are kept
apart by a lock.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rekindle_lab.experiment.files import sync_folder

RUNS = "runs.jsonl"
BEGUN = "begun.jsonl"


class LedgerError(RuntimeError):
    """The ledger cannot be used. The text says why and what to do."""


class Ledger:
    """The ledger of one experiment, open for appending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LedgerError(f"{folder}: this experiment is running already") from error
        try:
            self.cut_off = sum(_mend(folder / name) for name in (RUNS, BEGUN))
            """Lines that a crash had cut off."""
            self.runs = _lines(folder / RUNS)
            self.begun = _lines(folder / BEGUN)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    @property
    def done(self) -> set[int]:
        """Numbers of the runs that are done."""
        return {line["run"] for line in self.runs if line["outcome"] == "done"}

    @property
    def failed(self) -> set[int]:
        """Numbers of the runs that failed and are not done."""
        return {line["run"] for line in self.runs if line["outcome"] == "failed"} - self.done

    def attempts(self, run: int) -> int:
        """How often a run was begun."""
        return sum(line["run"] == run and not line.get("cleared") for line in self.begun)

    def interrupted(self) -> list[dict[str, Any]]:
        """Attempts that were begun and of which there is no line: what they left must be cleared away."""
        cleared = [line for line in self.begun if line.get("cleared")]
        over = {(line["run"], line["attempt"]) for line in [*self.runs, *cleared]}
        return [line for line in self.begun if (line["run"], line["attempt"]) not in over]

    def clear(self, begun: dict[str, Any]) -> None:
        """Say that what an interrupted attempt had left is gone."""
        self.begin({"run": begun["run"], "attempt": begun["attempt"], "cleared": True})

    def begin(self, line: dict[str, Any]) -> None:
        """Say that an attempt begins, before it does anything."""
        _append(self.folder / BEGUN, line)
        self.begun.append(line)

    def end(self, line: dict[str, Any]) -> None:
        """Say how it ended. From now on it counts."""
        _append(self.folder / RUNS, line)
        self.runs.append(line)


def _append(path: Path, line: dict[str, Any]) -> None:
    """Append a line and make it last; if that fails, the file is as it was."""
    new = not path.exists()
    data = (json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        before = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(before)
            raise LedgerError(f"{path}: {error}; make room, and start the experiment again: it goes on") from error
    if new:
        sync_folder(path.parent)


def _mend(path: Path) -> int:
    """Take off a last line that was cut off; gives how many there were."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole == len(data):
        return 0
    with path.open("r+b") as file:
        file.truncate(whole)
        os.fsync(file.fileno())
    return 1


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise LedgerError(f"{path}, row {number}: not JSON ({error}); it was changed by hand") from error
    return found
