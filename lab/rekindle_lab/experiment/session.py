"""Executes the runs in the committed order; resumes after an interruption."""

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
from rekindle_lab.numbers import finite, for_json
from rekindle_lab.runs.execute import Leaves, RunEnd, execute, remove_remains
from rekindle_lab.runs.ledger import RUNS, Ledger

ORDER = "order.json"
MOST_FAILURES = 3
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
            for row, line in enumerate(ledger.runs, start=1):
                if line.get("order") != order.digest:
                    raise orders.OrderError(
                        f"{self.folder / RUNS}, row {row}, column order: {line.get('order')!r} is not "
                        f"{order.digest!r} of {ORDER}: these runs belong to another order; give another --out, or "
                        "their own definition"
                    )
            if ledger.truncated:
                self.log(f"{ledger.truncated} line was truncated by a crash; that run is repeated")
            remove_remains(ledger, self.runner.clear, self.log)
            over = ledger.done if retry_failed else ledger.done | ledger.failed
            todo = [planned for planned in order.runs if planned.run not in over]
            usual_s = self._usual_s(ledger)
            about = f", about {duration(len(todo) * usual_s)}" if todo and usual_s else ""
            self.log(
                f"{self.experiment.name}: {len(order.runs)} runs, {len(ledger.done)} done, "
                f"{len(ledger.failed)} failed, {len(todo)} to do{about}"
            )
            in_a_row = 0
            for index, planned in enumerate(todo[:most]):
                line = self._one(ledger, order, planned)
                in_a_row = in_a_row + 1 if line["outcome"] == "failed" else 0
                self._log_run(ledger, planned, line, len(todo) - index - 1)
                if in_a_row == MOST_FAILURES:
                    raise ExperimentStoppedError(
                        f"{MOST_FAILURES} runs failed one after the other, the last with: {line['error']}; "
                        f"fix the cause, then start again with --retry-failed"
                    )
            return len(order.runs) - len(ledger.done)

    def _one(self, ledger: Ledger, order: Order, planned: Planned) -> dict[str, Any]:
        """Executes a run, and returns its line in the ledger."""
        leaves, work = partial(self.runner.leaves, planned), partial(self._work, order, planned)
        return execute(ledger, planned.run, leaves, work)

    def _work(self, order: Order, planned: Planned, leaves: Leaves) -> RunEnd:
        measured, error, status = Measured(), None, 0
        try:
            measured = self.runner.run(planned, self.experiment.settings(planned.treatment), leaves)
            _check(measured, self.experiment.responses)
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
        return statistics.median(one["took_s"] for one in ledger.runs) if ledger.runs else self.experiment.run_s

    def _log_run(self, ledger: Ledger, planned: Planned, line: dict[str, Any], left: int) -> None:
        treatment = ", ".join(f"{name}={level}" for name, level in planned.treatment.items())
        rest = f"{left} left, about {duration(left * (self._usual_s(ledger) or 0.0))}" if left else "the last"
        failed = f" FAILED: {line['error']}" if line["error"] else ""
        took = f"{line['outcome']} in {duration(line['took_s'])}"
        self.log(f"run {planned.run} of {line['of']} ({treatment}): {took}; {rest}{failed}")


def _check(measured: Measured, wanted: tuple[str, ...]) -> None:
    """Raises if a run misses one of the responses `wanted`, or if a response is not a finite number."""
    for name in wanted:
        value = measured.responses.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not finite(value):
            raise RunError(f"response {name}: {value!r} is not a finite number", measured=measured)
    measured.responses = {name: measured.responses[name] for name in wanted}


def duration(seconds: float) -> str:
    """Formats a duration for people: `12 s`, `3 min`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
