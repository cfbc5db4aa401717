"""Parameters of the models from files, and the command `rekindle-lab model`.

Parameters are measured downtimes of techniques (ways to renew a VMM) and of an OS reboot, and the intervals of both.
They are written by hand into a TOML file, or read from the JSON of a benchmark.
"""

import json

import pytest
from papers import CLUSTER, JBOSS, availability_of
from typer.testing import CliRunner

from rekindle_lab.cli import app
from rekindle_lab.models.parameters import ParameterError, by_hand, measured

BY_HAND = """
[timers]
vmm_interval_s = 2419200
[os]
downtime_s = 34
[technique.warm]
vmm_downtime_s = 43
[technique.cold]
vmm_downtime_s = 243
coupled = true
"""
TWO_SPARE_HOSTS = (
    BY_HAND
    + """
[technique.pair]
vmm_downtime_s = 0
degraded_rate = 0.5
degraded_s = 200
spare_hosts = 2
"""
)


@pytest.fixture
def by_hand_file(tmp_path):
    """Writes its argument to a file, and returns the path."""

    def write(content):
        path = tmp_path / "figures.toml"
        path.write_text(content)
        return path

    return write


def run_model(*options):
    """Runs `rekindle-lab model`."""
    return CliRunner().invoke(app, ["model", *options])


def test_parameters_by_hand(by_hand_file):
    """The file has the paper's figures (section 5.5), and so the paper's availability."""
    assert availability_of(by_hand(by_hand_file(BY_HAND)), "cold") == availability_of(JBOSS, "cold")


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("downtime_s = 34", "downtime = 34", r"os: unknown key 'downtime'; there are: downtime_s"),
        ("downtime_s = 34", "", r"os: .*downtime_s"),
        (BY_HAND, "os = 3", r"no table \[os\]"),
        ("coupled = true", 'coupled = "false"', r"technique\.cold\.coupled: 'false'; it must be true or false"),
        ("coupled = true", "coupled = 1", r"technique\.cold\.coupled: 1; it must be true or false"),
        ("coupled = true", "spare_hosts = 0.5", r"technique\.cold\.spare_hosts: 0\.5; it must be a whole number"),
    ],
)
def test_wrong_parameters_by_hand_are_named(by_hand_file, was, now, message):
    with pytest.raises(ParameterError, match=rf"figures\.toml: .*{message}"):
        by_hand(by_hand_file(BY_HAND.replace(was, now)))


@pytest.fixture
def vmm_json(tmp_path):
    """Returns a file as `make bench TOPIC=vmm` writes it."""
    rows = [
        {"guests": "11 x micro", "how": "warm", "gap ms": 800.0},
        {"guests": "11 x micro", "how": "cold", "gap ms": 31000.0},
        {"guests": "1 x micro", "how": "cold", "gap ms": 4300.0},
    ]
    path = tmp_path / "vmm.json"
    path.write_text(json.dumps({"tables": {"Guest-stopped time and service gap": rows}}))
    return path


def test_parameters_from_measured_results(vmm_json):
    """Gaps in ms become downtimes in s; the OS reboot takes as long as the cold gap of a single guest."""
    parameters = measured(vmm_json, "11 x micro", "1 x micro")
    assert (parameters.technique("warm").vmm_downtime_s, parameters.os.downtime_s) == (0.8, 4.3)
    assert parameters.technique("cold").coupled and not parameters.technique("warm").coupled
    assert any("taken as 0" in note for note in parameters.notes)


def test_unusable_measured_results_are_named(vmm_json):
    with pytest.raises(ParameterError, match="no guests '12 x micro'; there are: 11 x micro, 1 x micro"):
        measured(vmm_json, "12 x micro", "1 x micro")
    with pytest.raises(ParameterError, match="the downtime of an OS reboot is not known"):
        measured(vmm_json, "11 x micro")
    vmm_json.write_text("{}")
    with pytest.raises(ParameterError, match=r"vmm\.json: not the JSON of"):
        measured(vmm_json, "11 x micro", "1 x micro")


def test_the_command_prints_json_and_draws_figures(tmp_path):
    result = run_model("--paper", "cluster", "--json", "--figures", str(tmp_path / "f"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert [row["technique"] for row in document["techniques"]] == list(CLUSTER.techniques)
    for number in (9, 10, 16):
        assert (tmp_path / "f" / f"figure-{number}.png").read_bytes().startswith(b"\x89PNG")
    header = (tmp_path / "f" / "figure-16-paper.csv").read_text().splitlines()[0]
    assert header.startswith("hosts,warm_index,cold_index")


@pytest.mark.parametrize(
    "options",
    [
        ["--parameters", "figures.toml"],
        ["--paper", "jboss", "--vmm-interval-d", "0.1"],
        ["--paper", "jboss", "--os-interval-d", "10000"],
    ],
)
def test_missing_options_are_no_error(by_hand_file, tmp_path, monkeypatch, options):
    """Defaults apply, also where an interval is so short or so long that no techniques cross."""
    by_hand_file(TWO_SPARE_HOSTS)
    monkeypatch.chdir(tmp_path)
    result = run_model(*options, "--json", "--figures", "f")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["techniques"]


def test_the_command_prints_tables():
    """0.99992601 is warm's availability of section 5.5, printed in the paper as 0.99993."""
    result = run_model("--paper", "jboss")
    assert result.exit_code == 0, result.output
    assert "0.99992601" in result.output


def test_the_command_rejects_contradictory_options():
    result = run_model()
    assert result.exit_code == 2
    assert "give one of --paper, --parameters and --measured" in result.output
