"""The demo: its table, drawings and plan, from invented records.

A *record* is one replacement of a guest's VMM (QEMU), with the report of a client; `made_up.record` makes one.
"""

import json

import pytest
import typer
from typer.testing import CliRunner

from made_up import START_US, record
from rekindle_bench.demo import plan, vmm, web
from rekindle_lab.cli import app as rekindle_lab
from rekindle_lab.records import load, parse
from rekindle_lab.web import Answer

app = typer.Typer()
app.command()(vmm.main)
planner = typer.Typer()
planner.command()(plan.main)


def write(folder, *records):
    paths = []
    for one in records:
        path = folder / f"{one['how']}.json"
        path.write_text(json.dumps(one))
        paths.append(str(path))
    return paths


def test_draws_three_panels_and_prints_the_table(tmp_path):
    """The guest-stopped time is resume less stop: 5 ms, 1.2 s; a cold reboot has none."""
    files = write(
        tmp_path,
        record("warm", 3000, 3005, 14),
        record("saved", 3000, 4200, 1300),
        record("cold", 2500, 4000, 5600, failed=7),
    )
    out = tmp_path / "demo.png"
    result = CliRunner().invoke(app, ["--out", str(out), *files])
    assert result.exit_code == 0, result.output
    lines = [line.split("  ") for line in result.output.splitlines()]
    rows = {cells[0].strip(): [cell.strip() for cell in cells if cell.strip()] for cells in lines}
    assert rows["warm"] == ["warm", "7.2 -> 10.0", "5 ms", "14 ms", "0"]
    assert rows["saved"] == ["saved", "7.2 -> 10.0", "1.2 s", "1.3 s", "0"]
    assert rows["cold"] == ["cold", "7.2 -> 10.0", "- (shut down, booted)", "5.6 s", "7"]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_record_is_named(tmp_path):
    """The error names the file and the missing key."""
    bad = record("warm", 3000, 3005, 14)
    del bad["probe"]["gaps"]
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "x.png"), *write(tmp_path, bad)])
    assert result.exit_code == 1
    assert "warm.json" in result.output and "gaps" in result.output


def test_the_gap_is_the_one_at_the_stop_not_the_longest_of_the_run():
    """A longer gap of 99 ms, before the stop, does not count."""
    document = record("warm", 3000, 3005, 14)
    document["probe"]["gaps"].insert(0, {"start_unix_ns": (START_US + 500_000) * 1000, "length_us": 99_000})
    assert parse(document).gap_ms == 14


def test_throughput_counts_from_the_stop():
    """The probe starts 3 s before the stop."""
    edges, rates = parse(record("saved", 3000, 4200, 1300)).throughput()
    assert edges[0] == pytest.approx(-3.0)
    assert rates[0] == 800
    assert rates[31] == 0  # from 3.1 s of the probe on, so 0.1 s after the stop


def test_no_record_without_vms(tmp_path):
    """A reboot of no VM is no record."""
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"how": "warm", "reboot": {"vms": []}, "probe": {}}))
    with pytest.raises(ValueError, match="not a record"):
        load(path)


def rebooted(how, well, each_s):
    """Returns a reboot whose client gets 1 MB every 0.1 s before it, and every `each_s` from `well` on."""
    before = [Answer(-n / 10, 0.1, 10**6) for n in range(1, 51)]
    after = [Answer(well + n * each_s, each_s, 10**6) for n in range(1, web.AFTER + 1)]
    return web.Reboot(
        how=how,
        answers=before[::-1] + after,
        well=well,
        end=after[-1].at,
        retained_bytes=0 if how == web.COLD else 50_000_000,
    )


def test_a_web_server_through_both_reboots_is_drawn_and_listed(tmp_path):
    """200 files of 1 MB. Cold: after 20 + 200 * 0.05 = 30 s, at 20 MB/s; warm: after 10 + 200 * 0.025 = 15 s."""
    reboots = [rebooted(web.COLD, 20.0, 0.05), rebooted(web.WARM, 10.0, 0.025)]
    lines = web.summary(reboots).splitlines()
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:]]
    assert rows == [["cold", "20 s", "30 s", "10", "20", "0"], ["warm-cache", "10 s", "15 s", "10", "40", "50"]]
    web.draw(reboots, tmp_path / "web.png")
    assert (tmp_path / "web.png").read_bytes().startswith(b"\x89PNG")


def test_it_ends_with_the_plan_for_the_measurements(tmp_path):
    """The plan chooses the pair with the shortest gaps, and `rekindle-lab plan` accepts the file.

    The OS is rebooted every 7 days: each gap is 10.125 s, from the last answer before (-0.1 s) to the first after
    10.025 s. The VMM is renewed every 28 days with a gap of 14 ms.
    """
    files = write(
        tmp_path,
        record("warm", 3000, 3005, 14),
        record("saved", 3000, 4200, 1300),
        record("cold", 2500, 4000, 5600),
    )
    reboots = [rebooted(web.COLD, 20.0, 0.05), rebooted(web.WARM, 10.0, 0.025)]
    (tmp_path / "web.json").write_text(json.dumps(web.as_json(reboots)))
    out = tmp_path / "plan.toml"
    result = CliRunner().invoke(planner, ["--web", str(tmp_path / "web.json"), "--out", str(out), *files])
    assert result.exit_code == 0, result.output
    (chosen,) = [line for line in result.output.splitlines() if "<- the plan" in line]
    assert chosen.split()[:2] == ["warm", "warm-cache"]
    assert len(result.output.splitlines()) == 3 + 3 * 2  # every pair
    # The file has the usual format of a plan.
    whole = CliRunner().invoke(rekindle_lab, ["plan", str(out), "--json"])
    document = json.loads(whole.output)
    (vm,) = document["vms"]
    assert (vm["vmm"], vm["os"], document["reached"]) == ("warm", "warm-cache", True)
    down_s = 0.014 + (28 * 86400 - 0.014) / (7 * 86400) * 10.125  # from the last file before it
    assert vm["availability"] == pytest.approx(1 - down_s / (28 * 86400), rel=1e-9)


def test_a_plan_needs_the_measurements(tmp_path):
    """A file of `demo.web` without the gap is rejected by its name."""
    (tmp_path / "web.json").write_text('[{"how": "cold"}]')
    files = write(tmp_path, record("warm", 3000, 3005, 14))
    result = CliRunner().invoke(
        planner, ["--web", str(tmp_path / "web.json"), "--out", str(tmp_path / "plan.toml"), *files]
    )
    assert result.exit_code == 1
    assert "web.json: not a file of demo.web: it has no 'gap_s'" in result.output
