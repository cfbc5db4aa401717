"""The command `rekindle-lab plan`: it prints a plan, writes its timers, and reports a missed target."""

import json
from datetime import UTC, datetime

from invented_fleet import TEXT
from typer.testing import CliRunner

from rekindle_lab.cli import app


def test_the_command_line_prints_a_plan_and_writes_timers(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT.replace('allow_vmm = ["saved", "cold"]', ""))
    out = tmp_path / "units"
    arguments = ["plan", str(path), "--start", "2027-01-04T02:00:00", "--timers", str(out), "--host", "db-1"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["reached"] and len(document["order"]) == 10
    assert document["start_unix_s"] == datetime(2027, 1, 4, 2, tzinfo=UTC).timestamp()
    assert (out / "rekindle-plan-os-postgres.timer").exists()
    text = CliRunner().invoke(app, arguments).output
    assert "2027-01-04 02:00:00 UTC" in text and "independent" in text
    result = CliRunner().invoke(app, ["plan", str(path), "--timers", str(out)])
    assert result.exit_code == 2 and "--timers needs --host" in result.output


def test_the_command_line_reports_a_missed_target(tmp_path):
    path = tmp_path / "fleet.toml"
    path.write_text(TEXT)
    result = CliRunner().invoke(app, ["plan", str(path)])
    assert result.exit_code == 1
    assert "NOT REACHED: web/gpu" in result.output
