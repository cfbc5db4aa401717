"""The file of a plan: invalid content is reported with the file, the key and the remedy."""

import pytest
from invented_fleet import TEXT, fleet
from typer.testing import CliRunner

from rekindle_lab.cli import app
from rekindle_lab.toml import DefinitionError


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vmm_interval_max_d = 28", "", "vmm_interval_max_d: is missing (the longest"),
        ("os_interval_max_d = 7", "os_interval_max_d = 0", "os_interval_max_d: 0; it must be more than 0"),
        ("availability = 0.9999", "availability = 99.99", "target.availability: 99.99; it must be between 0 and 1"),
        ("downtime_s = 34", "downtime = 34", "os.cold: unknown key 'downtime'; did you mean downtime_s?"),
        ("vmm_downtime_s = 43\n", "", "vmm.warm.vmm_downtime_s: is missing"),
        ('["saved", "cold"]', '["savd"]', "hosts 'web', vms: allow_vmm: 'savd' was not measured; there are: warm"),
        ('allow_vmm = ["saved", "cold"]', "allow_vmm = []", "allow_vmm: is empty"),
        ('name = "db"', 'name = "web"', "hosts: 'web-1' is defined twice"),
        ("[[hosts]]", "[[host]]", "unknown key 'host'; did you mean hosts?"),
    ],
)
def test_an_error_names_the_key_that_is_wrong(old, new, message):
    text = TEXT.replace(old, new)
    with pytest.raises((DefinitionError, ValueError)) as caught:
        fleet(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[target]\navailability = 0.9999\ncapacity = 0.9", "target = 0.9999", "target: must be a table: [target]"),
        ("[target]", "measured = 1\n[target]", "measured: must be a table: [measured]"),
        ('group = "web"', 'group = ["web"]', 'group: ["web"] is not a text'),
        ('group = "web"', "group = 2027-01-04", 'group: "datetime.date(2027, 1, 4)" is not a text'),
        ('allow_vmm = ["saved", "cold"]', "allow_vmm = 1", 'allow_vmm: 1; it must be a list of names, as ["warm"]'),
        ('allow_vmm = ["saved", "cold"]', 'allow_vmm = "cold"', "allow_vmm: 'cold'; it must be a list of names"),
        (
            'allow_os = ["cold"]',
            'allow_os = [["cold"]]',
            "allow_os: [['cold']]; it must be a list of names, as [\"cold\"]",
        ),
        ("coupled = true", 'coupled = "false"', "vmm.cold.coupled: 'false'; it must be true or false"),
        ("coupled = true", "spare_hosts = 0.5", "vmm.cold.spare_hosts: 0.5; it must be a whole number"),
        ("vmm_downtime_s = 434", "vmm_downtime_s = -1", "vmm.saved.vmm_downtime_s: -1; it must be 0 or more"),
        ("vmm_downtime_s = 434", "", "vmm.saved.vmm_downtime_s: is missing"),
        ("downtime_s = 34\n", 'downtime_s = "34"\n', "os.cold.downtime_s: '34' is not a finite number"),
        ('name = "db"', 'name = "db%i"', "hosts: name: 'db%i'; it must be of a-z, A-Z, 0-9, `.`, `_` and `-`"),
        ('name = "front"', 'name = "front end"', "name: 'front end': ` ` is not allowed in a name; use only a-z, 0-9"),
        ('name = "front"', 'name = "front%n"', "name: 'front%n': `%` is not allowed in a name"),
        ('name = "front"', 'name = "a/b"', "name: 'a/b': `/` is not allowed in a name"),
        ('name = "front"', 'name = "Front"', "name: 'Front': `F` is not allowed in a name"),
        ('name = "gpu"', 'name = ""', "name: '': empty; write 1 to 63 characters"),
        ('name = "front"', 'name = ""', "name: '': empty; write 1 to 63 characters"),
        ('name = "gpu"', 'name = "-rf"', "name: '-rf': starts with `-`; start it with a-z or 0-9"),
        ('name = "front"', f'name = "{"a" * 62}"', f"{'a' * 62}-2 is 64 characters long; shorten it to at most 63"),
    ],
)
def test_invalid_content_is_reported_with_file_key_and_remedy(tmp_path, old, new, message):
    assert old in TEXT
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT.replace(old, new, 1))
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 2, result.output
    assert str(path) in result.output and message in result.output


@pytest.mark.parametrize("name", ["web", "0", "a.b_c-d", "10.77.0.1", "a" * 63])
def test_a_name_that_a_vm_can_have_is_accepted(name):
    assert fleet(TEXT.replace('"gpu"', f'"{name}"')).hosts[0].vms[1].name == name
