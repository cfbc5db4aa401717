"""Runs of an invented experiment, in the form that `rekindle-lab experiment` writes."""

import json

import numpy as np

DIGEST = "sha256:0123"


def line(run, level, responses, of=32, **changes):
    made = {
        "format": 1,
        "experiment": "made-up",
        "order": DIGEST,
        "run": run,
        "of": of,
        "block": 1,
        "treatment": {"technique": level},
        "attempt": 1,
        "outcome": "done",
        "exit_status": 0,
        "responses": responses,
        "samples": [],
        "versions": {"rekindle": "rekindle 0.1.0"},
    }
    return made | changes


def campaign(per_level=16, levels=("cold", "kexec"), seed=8):
    """Returns runs whose downtimes differ much, as do the variances of the downtimes; throughput does not differ."""
    generator = np.random.default_rng(seed)
    order = list(generator.permutation([level for level in levels for _ in range(per_level)]))
    lines = []
    for number, level in enumerate(order, start=1):
        index = levels.index(level)
        responses = {
            "downtime_s": float(generator.normal(117.5 / (1 + 3 * index), 4.0 / (1 + 6 * index))),
            "throughput_per_s": float(generator.normal(100, 3)),
        }
        lines.append(line(number, level, responses, of=len(order)))
    return lines


def order_json(path, lines, responses=("downtime_s", "throughput_per_s"), levels=("cold", "kexec")):
    document = {
        "digest": DIGEST,
        "factors": [{"name": "technique", "levels": list(levels)}],
        "responses": [{"name": name} for name in responses],
        "runs": [{key: one[key] for key in ("run", "block", "treatment")} for one in lines],
    }
    path.write_text(json.dumps(document))


def write(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path
