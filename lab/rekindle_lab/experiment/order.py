"""Draws and commits the order of an experiment's runs: drawn at random once, and on disk before the first run starts.

Each treatment occurs equally often in a block, and each block has a new random order. The file has the definition's
content and a digest over all. The line of every run repeats the digest, so that a run of another order is detected.

`draw` draws an order, `content` has the keys of the file (order.json), and `commit` writes it, or checks an existing
one. A treatment is one level of each factor; a replication is one of the runs of a treatment, counted over all blocks.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from rekindle_lab.experiment.definition import Experiment
from rekindle_lab.runs.files import write_whole

FORMAT = 1


class OrderError(ValueError):
    """The existing order belongs to another experiment."""


@dataclass(frozen=True)
class Planned:
    """A run of the order. Numbers start at 1."""

    run: int
    block: int
    replication: int
    treatment: dict[str, str]


@dataclass(frozen=True)
class Order:
    """A committed order."""

    digest: str
    runs: tuple[Planned, ...]


def draw(experiment: Experiment) -> tuple[Planned, ...]:
    """Draws the order from the experiment's seed."""
    generator = np.random.default_rng(experiment.seed)
    treatments = experiment.treatments()
    per_block = experiment.replications // experiment.blocks
    runs: list[Planned] = []
    for block in range(1, experiment.blocks + 1):
        first_replication = (block - 1) * per_block + 1
        replications = range(first_replication, first_replication + per_block)
        runs_of_block = list(product(treatments, replications))
        for index in generator.permutation(len(runs_of_block)):
            treatment, replication = runs_of_block[int(index)]
            runs.append(Planned(len(runs) + 1, block, replication, treatment))
    return tuple(runs)


def content(experiment: Experiment, runs: tuple[Planned, ...]) -> dict[str, Any]:
    """Returns the content of `order.json`, with its digest."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "experiment": experiment.name,
        "question": experiment.question,
        "seed": experiment.seed,
        "replications": experiment.replications,
        "blocks": experiment.blocks,
        "factors": [{"name": factor.name, "levels": list(factor.levels)} for factor in experiment.factors],
        "responses": [{"name": name} for name in experiment.responses],
        "definition": experiment.document,
        "runs": [asdict(run) for run in runs],
    }
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return {"digest": f"sha256:{hashlib.sha256(canonical).hexdigest()}", **document}


def commit(experiment: Experiment, path: Path) -> Order:
    """Returns the order at `path`, drawn and written if missing. Raises `OrderError` for another experiment's order."""
    if not path.exists():
        document = content(experiment, draw(experiment))
        write_whole(path, json.dumps(document, indent=1) + "\n")
    try:
        document = json.loads(path.read_text())
        runs = tuple(Planned(**run) for run in document["runs"])
        # Reads the runs from the file instead of drawing again: a later numpy may draw others from the same seed.
        expected = content(experiment, runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OrderError(f"{path}: not the order of an experiment ({error!r}); give another --out") from error
    for key, value in expected.items():
        if key != "digest" and document.get(key) != value:
            raise OrderError(f"{path}: its {key} differs from the definition's; give another --out")
    if document["digest"] != expected["digest"]:
        raise OrderError(f"{path}: its digest is wrong: the order was changed after it was committed")
    return Order(document["digest"], runs)
