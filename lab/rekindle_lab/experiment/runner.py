"""The interface of a run (`Runner`, `Measured`, `RunError`), and the runner that executes a program (`CommandRunner`).

A run takes a treatment (one level of each factor), given as the `settings` of these levels. It returns responses (the
measured numbers), raw samples and versions. Before a run starts, its `leftovers` are recorded: the names of everything
that it makes (folders, namespaces, processes), which `clear` removes if a kill has left them.
"""

import json
import os
import signal
import subprocess
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rekindle_lab.experiment.definition import Experiment
from rekindle_lab.experiment.order import Planned
from rekindle_lab.rekindle import last_json
from rekindle_lab.runs.processes import with_variable
from rekindle_lab.runs.workspace import end_processes

MARK = "REKINDLE_LAB_MARK"
"""Environment variable by which the processes of a killed run are found."""


class RunError(Exception):
    """A run failed. `exit_status` is that of the failed program."""

    def __init__(self, text: str, exit_status: int = 1, measured: "Measured | None" = None) -> None:
        self.exit_status = exit_status
        self.measured = measured
        """Results of the run up to its failure."""
        super().__init__(text)


@dataclass
class Measured:
    """Results of a run."""

    responses: dict[str, float] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """All raw samples, unchanged."""
    versions: dict[str, str] = field(default_factory=dict)


class Runner(Protocol):
    """Executes runs, one at a time."""

    def leftovers(self, planned: Planned, attempt: int) -> dict[str, Any]:
        """Returns names of everything that a run will make, as JSON, so that `clear` finds it."""

    def run(self, planned: Planned, settings: dict[str, Any], leftovers: dict[str, Any]) -> Measured:
        """Executes a run from a fresh state, and leaves nothing behind. Raises `RunError`."""

    def clear(self, leftovers: dict[str, Any]) -> None:
        """Removes the remains of a killed run. May be called again."""


class CommandRunner:
    """Executes each run as a program that gets its treatment as JSON in `REKINDLE_LAB_RUN`.

    The last line of the program's standard output is `{"responses": {..}, "samples": [..], "versions": {..}}`;
    `samples` and `versions` may be omitted. An exit status other than 0 is a failed run.
    """

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment = experiment
        self.folder = folder

    def leftovers(self, planned: Planned, attempt: int) -> dict[str, Any]:
        """Returns a mark for the environment of all processes of the run. The program itself removes other remains."""
        return {"mark": f"{planned.run}-{attempt}-{uuid.uuid4()}"}

    def clear(self, leftovers: dict[str, Any]) -> None:
        """Ends the processes of an attempt that was killed, since they would run during the next attempt."""
        if "mark" in leftovers:
            end_processes(with_variable(MARK, leftovers["mark"]))

    def run(self, planned: Planned, settings: dict[str, Any], leftovers: dict[str, Any]) -> Measured:
        """Runs the program in the definition's folder."""
        process = self._start(planned, settings, leftovers)
        program = self.experiment.command.argv[0]
        try:
            output, errors = process.communicate(timeout=self.experiment.command.deadline_s)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunError(f"{program}: not done within {error.timeout:g} s", 124) from error
            raise
        if process.returncode != 0:
            raise RunError(f"{program}: exit status {process.returncode}: {errors.strip()[-2000:]}", process.returncode)
        try:
            return _parse_result(output)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{program}: its last line is not a result ({error!r}): {output[-500:]}") from error

    def _start(self, planned: Planned, settings: dict[str, Any], leftovers: dict[str, Any]) -> subprocess.Popen[str]:
        run = {"run": planned.run, "treatment": planned.treatment, "settings": settings}
        argv = self.experiment.command.argv
        try:
            return subprocess.Popen(
                argv,
                cwd=self.folder,
                env={**os.environ, "REKINDLE_LAB_RUN": json.dumps(run), MARK: leftovers["mark"]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"{argv[0]}: {error}") from error


def _parse_result(output: str) -> Measured:
    """Parses the last line of a program's output. Raises `ValueError` or another error for an invalid result."""
    document = last_json(output)
    measured = Measured(document["responses"], document.get("samples", []), document.get("versions", {}))
    for key, value, kind in (
        ("responses", measured.responses, dict),
        ("samples", measured.samples, list),
        ("versions", measured.versions, dict),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{key}: {value!r} is not of the kind {kind.__name__}")
    for name, version in measured.versions.items():
        if not isinstance(version, str):
            raise ValueError(f"versions.{name}: {version!r} is not a text")
    return measured
