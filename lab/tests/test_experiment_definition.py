"""The definition of an experiment: an error names the key, and a power analysis can give the replications."""

import pytest
from invented_experiment import DOCUMENT, invented_experiment

from rekindle_lab.experiment.definition import load, parse
from rekindle_lab.toml import DefinitionError


def test_replications_from_a_power_analysis_fill_blocks():
    """An increase of 0.15 needs 18 runs for a power of 0.90 (`test_analysis_statistics`), or 20 to fill 4 blocks."""
    assert invented_experiment(replications={"sd_increase": 0.15}, blocks=1).replications == 18
    assert invented_experiment(replications={"sd_increase": 0.15}, blocks=4).replications == 20
    assert invented_experiment(replications={"sd_increase": 0.15, "power": 0.87}, blocks=1).replications == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replication": 3}, "unknown key 'replication'; did you mean replications?"),
        ({"name": "Made Up"}, "name: 'Made Up'; it must be of a-z"),
        ({"seed": None}, "dates, NaN|seed: is missing"),
        ({"replications": 1}, "replications: 1; it must be a whole number of at least 2"),
        ({"replications": {"power": 0.9}}, "replications.sd_increase: is missing"),
        ({"blocks": 3}, "blocks: 3; 4 replications cannot be split evenly into them"),
        ({"factor": []}, r"no \[\[factor\]\]"),
        ({"factor": [{"name": "a", "levels": {"x": {}}}]}, "factor 'a': needs at least two"),
        ({"factor": [{"name": "a", "levels": {"x": {}, "y": 3}}]}, "level 'y': must be a table"),
        (
            {"factor": [{"name": n, "levels": {"x": {"how": n}, "y": {}}} for n in ("a", "b")]},
            "factor 'b': 'how' is set by factor 'a' too; make them one factor",
        ),
        ({"response": [{"name": "Down Time"}]}, "names are like downtime_s"),
        ({"response": [{"name": "a_s"}, {"name": "a_s"}]}, "response: 'a_s' is defined twice"),
        ({"runner": "vm"}, "runner: 'vm'; there are: guest, command"),
        ({"command": {}}, "command.argv: is missing"),
        ({"command": {"argv": "true"}}, "command.argv: 'true'; it must be like"),
        ({"run_s": 0}, "run_s: 0; it must be seconds, more than 0"),
        ({"guest": {"disk_server": "yes"}}, "guest.disk_server: 'yes'; it must be like True"),
        ({"guest": {"measure_s": -1}}, "guest.measure_s: -1; it must be like 15.0"),
        ({"guest": {"measure_s": float("nan")}}, "dates, NaN and infinity have no meaning here"),
    ],
)
def test_an_error_in_a_definition_names_the_key(changes, message):
    with pytest.raises(DefinitionError, match=message):
        parse(DOCUMENT | changes)


def test_a_bad_definitions_file_is_named(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("name = ")
    with pytest.raises(DefinitionError, match=r"x\.toml: "):
        load(path)
