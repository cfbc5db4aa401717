"""Records of an experiment's or benchmark's runs, in two files of JSON lines that only grow (`Ledger`).

    begun.jsonl   before an attempt: {"run": 3, "attempt": 1, "began_unix_s": ..., "leaves": {names of what it makes}}
                  after the remains of a killed attempt are removed: {"run": 3, "attempt": 1, "cleared": true}
    runs.jsonl    after an attempt: {"run": 3, "attempt": 1, "outcome": "done", "took_s": ..., and what was measured}

A run is known by its number, or by a name. It has several attempts if one of them failed, or was killed.
A run counts once its whole line is on disk. A run that is killed before is repeated. Only the last line can be
truncated, by a kill or a full disk; it is removed when the ledger is opened. A lock prevents two sessions at the same
time.
"""

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rekindle_lab.runs.files import sync_folder

RUNS = "runs.jsonl"
STARTED = "begun.jsonl"


class LedgerError(RuntimeError):
    """The ledger cannot be used. The text has the reason and the remedy."""


class Ledger:
    """The ledger of one experiment, open for appending. `prefix`: of its files, if several ledgers share a folder."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self._runs, self._started = folder / f"{prefix}{RUNS}", folder / f"{prefix}{STARTED}"
        self._lock = os.open(folder / f".{prefix}lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LedgerError(f"{folder}: this experiment is running already") from error
        try:
            self.truncated = sum(_remove_truncated_line(path) for path in (self._runs, self._started))
            """Number of lines that a crash had truncated."""
            self.runs = _read_lines(self._runs)
            """The lines of finished attempts."""
            self.started = _read_lines(self._started)
            """The lines before attempts."""
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
    def done(self) -> set[int | str]:
        """Returns the numbers of the runs that are done."""
        return {line["run"] for line in self.runs if line["outcome"] == "done"}

    @property
    def failed(self) -> set[int | str]:
        """Returns the numbers of the runs that failed and are not done."""
        return {line["run"] for line in self.runs if line["outcome"] == "failed"} - self.done

    def attempts(self, run: int | str) -> int:
        """Returns how often a run was started."""
        return sum(line["run"] == run and not line.get("cleared") for line in self.started)

    def interrupted(self) -> list[dict[str, Any]]:
        """Returns the lines of attempts that were started but have no result: their remains must be removed."""
        cleared = [line for line in self.started if line.get("cleared")]
        ended_attempts = {(line["run"], line["attempt"]) for line in [*self.runs, *cleared]}
        return [line for line in self.started if (line["run"], line["attempt"]) not in ended_attempts]

    def restart(self) -> None:
        """Deletes the records of all runs: the experiment starts anew."""
        for path in (self._runs, self._started):
            path.unlink(missing_ok=True)
        self.runs, self.started = [], []

    def clear(self, started: dict[str, Any]) -> None:
        """Records that the remains of an interrupted attempt are removed. `started`: the line before that attempt."""
        self.begin({"run": started["run"], "attempt": started["attempt"], "cleared": True})

    def begin(self, line: dict[str, Any]) -> None:
        """Records that an attempt starts. Called before the attempt makes anything."""
        _append(self._started, line)
        self.started.append(line)

    def end(self, line: dict[str, Any]) -> None:
        """Records the result of an attempt. From then on the run counts."""
        _append(self._runs, line)
        self.runs.append(line)


def _append(path: Path, line: dict[str, Any]) -> None:
    """Appends a line and syncs the file; restores the file if that fails."""
    is_new = not path.exists()
    data = (json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        size_before = file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(data):
                written += file.write(data[written:])
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(size_before)
            raise LedgerError(f"{path}: {error}; make room, then start the experiment again to continue") from error
    if is_new:
        sync_folder(path.parent)


def _remove_truncated_line(path: Path) -> int:
    """Removes a truncated last line; returns the number of lines removed."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    size_of_whole_lines = data.rfind(b"\n") + 1
    if size_of_whole_lines == len(data):
        return 0
    with path.open("r+b") as file:
        file.truncate(size_of_whole_lines)
        os.fsync(file.fileno())
    return 1


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise LedgerError(f"{path}, row {number}: not JSON ({error}); it was changed by hand") from error
    return lines
