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


def campaign(levels=("cold", "kexec")):
    """Returns 16 runs of each level, in a random order; downtimes differ, as do their variances, throughput does not.

    Downtimes in s, mean and standard deviation: 117.5 and 4 of the first level, 29.4 and 0.6 of the second.
    """
    generator = np.random.default_rng(8)
    order = list(generator.permutation([level for level in levels for _ in range(16)]))
    lines = []
    for number, level in enumerate(order, start=1):
        rank = levels.index(level)
        responses = {
            "downtime_s": float(generator.normal(117.5 / (1 + 3 * rank), 4.0 / (1 + 6 * rank))),
            "throughput_per_s": float(generator.normal(100, 3)),
        }
        lines.append(line(number, level, responses, total=len(order)))
    return lines


def order_json(path, lines, levels=("cold", "kexec")):
    """Writes the order of these runs, as it is drawn and written before the first run."""
    document = {
        "digest": DIGEST,
        "factors": [{"name": "technique", "levels": list(levels)}],
        "responses": [{"name": "downtime_s"}, {"name": "throughput_per_s"}],
        "runs": [{key: run[key] for key in ("run", "block", "treatment")} for run in lines],
    }
    path.write_text(json.dumps(document))


def write(path, lines):
    """Writes the runs as JSON lines, and returns the path."""
    path.write_text("".join(json.dumps(run) + "\n" for run in lines))
    return path


def three_groups():
    """Returns samples of three levels with different means, deviations and sizes."""
    generator = np.random.default_rng(3)
    return [generator.normal(mean, sd, n) for mean, sd, n in ((10, 1, 12), (11, 2, 9), (10.5, 4, 15))]
