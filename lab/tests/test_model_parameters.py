"""Parameters of the availability model from files, and the command `rekindle-lab model`.

The model is that of RootHammer (Kourai and Chiba, "Fast Software Rejuvenation of Virtual Machine Monitors", TDSC 2010):
the VMM and each guest's OS are renewed (rebooted) on timers, and availability is the share of time in which a guest
answers. A *technique* is one way to renew the VMM under its guests:

- `warm` keeps the guests in memory, `cold` shuts them down. Cold is *coupled*: the guests' OS is rebooted with the VMM.
- After a renewal, a guest may be *degraded*: for `degraded_s` it loses the share `degraded_rate` of its throughput.

Parameters are the downtimes of the techniques and of an OS reboot, and both intervals. They come from a TOML file that
is written by hand, or from the JSON of a benchmark.
"""

import json

import pytest
from papers import CLUSTER, JBOSS, availability_of
from typer.testing import CliRunner

from rekindle_lab.cli import app
from rekindle_lab.models.parameters import DAY_S, ParameterError, by_hand, measured

FIGURES_OF_SECTION_5_5 = """
[timers]
vmm_interval_s = 2419200  # 28 days
[os]
downtime_s = 34
[technique.warm]
vmm_downtime_s = 43
[technique.cold]
vmm_downtime_s = 243
coupled = true
"""
"""The TOML file with the paper's figures for warm and cold: a JBoss server in each of 11 guests."""
DEGRADING_TECHNIQUE = """
[technique.pair]
vmm_downtime_s = 0
degraded_rate = 0.5
degraded_s = 200
spare_hosts = 2
"""
"""A technique without downtime: guests move to spare hosts, at half their throughput."""


@pytest.fixture
def by_hand_file(tmp_path):
    """Returns a function that writes its argument to `figures.toml`, and returns the path."""

    def write(content):
        path = tmp_path / "figures.toml"
        path.write_text(content)
        return path

    return write


def run_model(*options):
    """Runs `rekindle-lab model`."""
    return CliRunner().invoke(app, ["model", *options])


def test_parameters_by_hand(by_hand_file):
    """The same figures from a file and from the lab's own table of the paper (`JBOSS`) give the same availability."""
    parameters = by_hand(by_hand_file(FIGURES_OF_SECTION_5_5))
    assert availability_of(parameters, "cold") == availability_of(JBOSS, "cold")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("downtime_s = 34", "downtime = 34", r"os: unknown key 'downtime'; there are: downtime_s"),
        ("downtime_s = 34", "", r"os: .*downtime_s"),
        (FIGURES_OF_SECTION_5_5, "os = 3", r"no table \[os\]"),
        ("coupled = true", 'coupled = "false"', r"technique\.cold\.coupled: 'false'; it must be true or false"),
        ("coupled = true", "coupled = 1", r"technique\.cold\.coupled: 1; it must be true or false"),
        ("coupled = true", "spare_hosts = 0.5", r"technique\.cold\.spare_hosts: 0\.5; it must be a whole number"),
    ],
)
def test_wrong_parameters_by_hand_are_named(by_hand_file, old, new, message):
    with pytest.raises(ParameterError, match=rf"figures\.toml: .*{message}"):
        by_hand(by_hand_file(FIGURES_OF_SECTION_5_5.replace(old, new)))


@pytest.fixture
def vmm_json(tmp_path):
    """Returns a file as `make bench TOPIC=vmm` writes it: `how` is the technique, micro is a small guest image."""
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
    parameters = measured(vmm_json, guests="11 x micro", os_guests="1 x micro")
    warm, cold = parameters.technique("warm"), parameters.technique("cold")
    assert (warm.vmm_downtime_s, cold.vmm_downtime_s, parameters.os.downtime_s) == (0.8, 31.0, 4.3)
    assert cold.coupled and not warm.coupled
    assert "degradation around renewals is not in these results; it is taken as 0" in parameters.notes


def test_unusable_measured_results_are_named(vmm_json):
    with pytest.raises(ParameterError, match="no guests '12 x micro'; there are: 11 x micro, 1 x micro"):
        measured(vmm_json, guests="12 x micro", os_guests="1 x micro")
    with pytest.raises(ParameterError, match="the downtime of an OS reboot is not known"):
        measured(vmm_json, guests="11 x micro")
    vmm_json.write_text("{}")
    with pytest.raises(ParameterError, match=r"vmm\.json: not the JSON of"):
        measured(vmm_json, guests="11 x micro", os_guests="1 x micro")


def test_the_command_prints_json_and_draws_figures(tmp_path):
    result = run_model("--paper", "cluster", "--json", "--figures", str(tmp_path / "f"))  # cluster: sections 6.1 to 6.3
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
    """Defaults apply, also where an interval is so short or so long that one technique is always the best.

    The command then has no crossing to report, an interval at which another technique becomes the best.
    """
    by_hand_file(FIGURES_OF_SECTION_5_5 + DEGRADING_TECHNIQUE)
    monkeypatch.chdir(tmp_path)
    result = run_model(*options, "--json", "--figures", "f")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["techniques"]


def test_the_command_prints_tables():
    """Warm's availability for the figures of section 5.5, which the paper rounds to 0.99993."""
    vmm_interval_s, os_interval_s = 28 * DAY_S, 7 * DAY_S
    warm_downtime_s, os_downtime_s = 43, 34
    os_reboots = (vmm_interval_s - warm_downtime_s) / os_interval_s  # the OS's timer stands still meanwhile
    availability = 1 - (warm_downtime_s + os_reboots * os_downtime_s) / vmm_interval_s
    result = run_model("--paper", "jboss")
    assert result.exit_code == 0, result.output
    assert f"{availability:.8f}" in result.output


def test_the_command_rejects_contradictory_options():
    result = run_model()
    assert result.exit_code == 2
    assert "give one of --paper, --parameters and --measured" in result.output
