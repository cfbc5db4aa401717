"""Raw data: a CSV file that grows by a row for each thing measured, so that an interrupted run loses nothing."""

import csv
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


class RowFile:
    """Appends rows of one dataclass to a file that it starts anew. Lists are written as JSON, `None` as nothing."""

    def __init__(self, path: Path, kind: type) -> None:
        self.path = path
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(kind)])
        self._writer.writeheader()
        self._file.flush()

    def append(self, row: Any) -> None:  # noqa: ANN401
        """Write a row, at once."""
        values = {
            key: json.dumps(value, separators=(",", ":")) if isinstance(value, list) else value
            for key, value in asdict(row).items()
        }
        self._writer.writerow(values)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
