"""The order of an experiment's runs is drawn at random, and committed: written to order.json before the first run."""

import json
from collections import Counter

import pytest
from invented_experiment import FakeRunner, invented_experiment, run_session

from rekindle_lab.experiment import order


def test_the_order_is_on_disk_before_the_first_run(tmp_path):
    folder = tmp_path / "out"

    def check_order():
        assert json.loads((folder / "order.json").read_text())["runs"]

    run_session(folder, FakeRunner(tmp_path / "log", {0: check_order}))


def test_every_block_has_all_treatments_equally_often_and_the_seed_decides():
    """16 replications of two levels in 4 blocks: each block has each level 4 times."""
    experiment = invented_experiment(replications=16, blocks=4)
    runs = order.draw(experiment)
    for block in range(1, 5):
        assert Counter(run.treatment["technique"] for run in runs if run.block == block) == {"cold": 4, "kexec": 4}
    assert [run.run for run in runs] == list(range(1, 33))
    assert {(run.treatment["technique"], run.replication) for run in runs} == {
        (level, number) for level in ("cold", "kexec") for number in range(1, 17)
    }
    assert order.draw(experiment) == runs
    assert order.draw(invented_experiment(replications=16, blocks=4, seed=4)) != runs


def test_the_order_is_fully_random():
    """Over many seeds, the first run has each level equally often."""
    first_levels = Counter(
        order.draw(invented_experiment(seed=seed, blocks=1))[0].treatment["technique"] for seed in range(400)
    )
    assert abs(first_levels["cold"] - 200) < 3 * 10  # three standard deviations: sqrt(400 / 4) = 10


def test_a_changed_order_or_that_of_another_experiment_is_rejected(tmp_path):
    run_session(tmp_path, FakeRunner(tmp_path / "log"), most=1)
    path = tmp_path / "order.json"
    with pytest.raises(order.OrderError, match="its seed differs from the definition's; give another --out"):
        run_session(tmp_path, FakeRunner(tmp_path / "log"), invented_experiment(seed=4))
    document = json.loads(path.read_text())
    document["runs"][2]["treatment"], document["runs"][3]["treatment"] = {"technique": "x"}, {"technique": "y"}
    path.write_text(json.dumps(document))
    with pytest.raises(order.OrderError, match="the order was changed after it was committed"):
        run_session(tmp_path, FakeRunner(tmp_path / "log"))
