"""Executes an experiment's runs in the committed order; continues after an interruption (`ExperimentSession`).

The order of the runs is drawn at random and written to `order.json` ("committed") before the first run. A session is
one start of the command: it continues after the last finished run. The `leftovers` of a run are the names of what it
makes, recorded before it starts, so that the next session can remove what a kill has left. The ledger records each run
(`rekindle_lab.runs.ledger`); `_measure` has the keys of a run's line, which `rekindle_lab.analysis.runs` reads again.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rekindle_lab.analysis.runs import FORMAT
from rekindle_lab.experiment import order as orders
from rekindle_lab.experiment.definition import Experiment
from rekindle_lab.experiment.order import Order, Planned
from rekindle_lab.experiment.runner import Measured, RunError, Runner
from rekindle_lab.numbers import for_json, is_finite_number
from rekindle_lab.runs.execute import Leftovers, RunEnd, execute, remove_remains
from rekindle_lab.runs.ledger import RUNS, Ledger

ORDER = "order.json"
MAX_FAILURES_IN_A_ROW = 3
"""Number of failures in a row that end a session, since their cause is then not the single run."""


class ExperimentStoppedError(RuntimeError):
    """A session ended before all runs were done. Finished runs are kept."""


@dataclass
class ExperimentSession:
    """A session of an experiment in `folder`. `log` prints progress."""

    experiment: Experiment
    folder: Path
    runner: Runner
    versions: dict[str, str]
    log: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def run(self, *, retry_failed: bool = False, most: int | None = None) -> int:
        """Executes the remaining runs, at most `most` of them; returns how many runs then remain."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with Ledger(self.folder) as ledger:
            order = orders.commit(self.experiment, self.folder / ORDER)
            self._check_order(ledger, order)
            if ledger.truncated:
                self.log(f"{ledger.truncated} line was truncated by a crash; that run is repeated")
            remove_remains(ledger, self.runner.clear, self.log)
            finished = ledger.done if retry_failed else ledger.done | ledger.failed
            remaining = [planned for planned in order.runs if planned.run not in finished]
            self._log_start(ledger, order, len(remaining))
            self._execute_all(ledger, order, remaining, most)
            return len(order.runs) - len(ledger.done)

    def _check_order(self, ledger: Ledger, order: Order) -> None:
        """Checks that the recorded runs are of this order."""
        for row, line in enumerate(ledger.runs, start=1):
            if line.get("order") != order.digest:
                raise orders.OrderError(
                    f"{self.folder / RUNS}, row {row}, column order: {line.get('order')!r} is not "
                    f"{order.digest!r} of {ORDER}: these runs belong to another order; give another --out, or "
                    "their own definition"
                )

    def _log_start(self, ledger: Ledger, order: Order, remaining: int) -> None:
        usual_s = self._usual_s(ledger)
        estimate = f", about {duration(remaining * usual_s)}" if remaining and usual_s else ""
        self.log(
            f"{self.experiment.name}: {len(order.runs)} runs, {len(ledger.done)} done, "
            f"{len(ledger.failed)} failed, {remaining} to do{estimate}"
        )

    def _execute_all(self, ledger: Ledger, order: Order, remaining: list[Planned], most: int | None) -> None:
        """Executes runs; raises `ExperimentStoppedError` after `MAX_FAILURES_IN_A_ROW` failed runs."""
        failures_in_a_row = 0
        for index, planned in enumerate(remaining[:most]):
            line = self._execute(ledger, order, planned)
            failures_in_a_row = failures_in_a_row + 1 if line["outcome"] == "failed" else 0
            self._log_run(ledger, planned, line, len(remaining) - index - 1)
            if failures_in_a_row == MAX_FAILURES_IN_A_ROW:
                raise ExperimentStoppedError(
                    f"{failures_in_a_row} runs failed one after the other, the last with: {line['error']}; "
                    f"fix the cause, then start again with --retry-failed"
                )

    def _execute(self, ledger: Ledger, order: Order, planned: Planned) -> dict[str, Any]:
        """Executes a run, and returns its line in the ledger."""
        return execute(
            ledger, planned.run, partial(self.runner.leftovers, planned), partial(self._measure, order, planned)
        )

    def _measure(self, order: Order, planned: Planned, leftovers: Leftovers) -> RunEnd:
        """Executes a run by the runner, and returns what the run's line records."""
        measured, error, status = Measured(), None, 0
        try:
            measured = self.runner.run(planned, self.experiment.settings(planned.treatment), leftovers)
            _keep_responses(measured, self.experiment.responses)
        except RunError as failure:
            error, status, measured = str(failure), failure.exit_status, failure.measured or measured
        entries = {
            "format": FORMAT,
            "experiment": self.experiment.name,
            "order": order.digest,
            "of": len(order.runs),
            "block": planned.block,
            "replication": planned.replication,
            "treatment": planned.treatment,
            "exit_status": status,
            "error": error,
            "responses": for_json(measured.responses, str),
            "samples": for_json(measured.samples, str),
            "versions": {**self.versions, **measured.versions},
        }
        return RunEnd("done" if error is None else "failed", entries)

    def _usual_s(self, ledger: Ledger) -> float | None:
        """Returns the usual duration of a run in seconds: the median so far, or the estimate in the definition."""
        return statistics.median(line["took_s"] for line in ledger.runs) if ledger.runs else self.experiment.run_s

    def _log_run(self, ledger: Ledger, planned: Planned, line: dict[str, Any], runs_left: int) -> None:
        treatment = ", ".join(f"{name}={level}" for name, level in planned.treatment.items())
        outlook = "the last"
        if runs_left:
            outlook = f"{runs_left} left, about {duration(runs_left * (self._usual_s(ledger) or 0.0))}"
        failed = f" FAILED: {line['error']}" if line["error"] else ""
        outcome = f"{line['outcome']} in {duration(line['took_s'])}"
        self.log(f"run {planned.run} of {line['of']} ({treatment}): {outcome}; {outlook}{failed}")


def _keep_responses(measured: Measured, names: tuple[str, ...]) -> None:
    """Keeps only the responses called `names`. Raises if one of them is missing or not a finite number."""
    for name in names:
        value = measured.responses.get(name)
        if not is_finite_number(value):
            raise RunError(f"response {name}: {value!r} is not a finite number", measured=measured)
    measured.responses = {name: measured.responses[name] for name in names}


def duration(seconds: float) -> str:
    """Formats a duration for people: `12 s`, `3 min`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
