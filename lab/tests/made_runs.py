"""Runs of an invented experiment, in the form that `rekindle-lab experiment` writes.

The experiment has one factor, "technique". A line is one run, with the values of its responses (the measured numbers).
"""

import json

import numpy as np

DIGEST = "sha256:0123"


def line(run, level, responses, total=32, **changes):
    """Returns the line of a run: number `run` of `total` runs, at this level of the factor."""
    fields = {
        "format": 1,
        "experiment": "made-up",
        "order": DIGEST,
        "run": run,
        "of": total,
        "block": 1,
        "treatment": {"technique": level},
        "attempt": 1,
        "outcome": "done",
        "exit_status": 0,
        "responses": responses,
        "samples": [],
        "versions": {"rekindle": "rekindle 0.1.0"},
    }
    return fields | changes


def campaign(per_level=16, levels=("cold", "kexec"), seed=8):
    """Returns runs whose downtimes differ much, as do the variances of the downtimes; throughput does not differ."""
    generator = np.random.default_rng(seed)
    order = list(generator.permutation([level for level in levels for _ in range(per_level)]))
    lines = []
    for number, level in enumerate(order, start=1):
        # Each further level has a much shorter downtime, and a smaller deviation: 117.5 and 4 s, then 29.4 and 0.6 s.
        index = levels.index(level)
        responses = {
            "downtime_s": float(generator.normal(117.5 / (1 + 3 * index), 4.0 / (1 + 6 * index))),
            "throughput_per_s": float(generator.normal(100, 3)),
        }
        lines.append(line(number, level, responses, total=len(order)))
    return lines


def order_json(path, lines, responses=("downtime_s", "throughput_per_s"), levels=("cold", "kexec")):
    """Writes the committed order of these runs."""
    document = {
        "digest": DIGEST,
        "factors": [{"name": "technique", "levels": list(levels)}],
        "responses": [{"name": name} for name in responses],
        "runs": [{key: run[key] for key in ("run", "block", "treatment")} for run in lines],
    }
    path.write_text(json.dumps(document))


def write(path, lines):
    """Writes the runs as JSON lines, and returns the path."""
    path.write_text("".join(json.dumps(run) + "\n" for run in lines))
    return path
