"""An invented experiment with 8 runs, and a runner that executes none of them but logs its calls.

- A treatment is one level of each factor, and a level is a set of settings, such as `how = "cold"`. A response is a
  number that each run measures. A block has all treatments equally often.
- The `leftovers` of a run are the names of what it makes, which `clear` removes if a kill has left it.
"""

import json

from rekindle_lab.experiment.definition import parse
from rekindle_lab.experiment.runner import Measured, RunError
from rekindle_lab.experiment.session import ExperimentSession

DOCUMENT = {
    "name": "made-up",
    "seed": 3,
    "replications": 4,
    "blocks": 2,
    "runner": "command",
    "factor": [{"name": "technique", "levels": {"cold": {"how": "cold"}, "kexec": {"how": "kexec"}}}],
    "response": [{"name": "downtime_s"}],
    "command": {"argv": ["true"]},
}


def invented_experiment(**changes):
    """Returns the experiment of `DOCUMENT`, with some of its top-level keys replaced."""
    return parse(json.loads(json.dumps(DOCUMENT | changes)))


class FakeRunner:
    """A runner that logs its calls; `ends` maps the number of a call to what happens in that call."""

    def __init__(self, log, ends=None):
        self.log, self.ends = log, ends or {}

    def leftovers(self, planned, attempt):
        return {"folder": f"left-{planned.run}-{attempt}"}

    def clear(self, leftovers):
        self.write("cleared", leftovers["folder"])

    def write(self, *words):
        with self.log.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def run(self, planned, settings, leftovers):
        call = sum(line.startswith("run") for line in self.log.read_text().splitlines()) if self.log.exists() else 0
        self.write("run", planned.run, settings["how"])
        end = self.ends.get(call)
        if end is not None:
            end()
        value = planned.run + (100.0 if settings["how"] == "cold" else 10.0)
        return Measured({"downtime_s": value}, [{"t_s": 0.0, "raw": planned.run}], {"fake": "1"})


def run_session(folder, runner, experiment=None, **options):
    """Starts or continues the experiment; returns the number of runs that are not done, and the messages."""
    messages = []
    experiment_session = ExperimentSession(
        experiment or invented_experiment(), folder, runner, {"rekindle": "0.1.0"}, messages.append
    )
    return experiment_session.run(**options), messages


def lines(folder):
    """Returns the lines of the finished runs, parsed."""
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def fail_run():
    """Fails the run in which it is called, with exit status 3."""
    raise RunError("no answer", 3)
