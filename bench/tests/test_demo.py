"""The demo: its tables, drawings and plan, from invented measurements. No guest is started.

The demo measures one VM and then prints a plan for it, in three programs:

- `demo.vmm`: the guest's VMM (QEMU) is replaced, warm (RAM stays in place), saved (RAM to disk and back) and cold (the
  guest is shut down and booted). A *record* (`invented_record.record`) is one replacement with the report of a client.
- `demo.web`: the guest's OS is rebooted cold, and with a warm cache (the disk server keeps what the guest had cached),
  while a client requests files from its web server.
- `demo.plan`: chooses a way to replace the VMM and a way to reboot the OS, from both measurements.
"""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from invented_record import START_US, record
from rekindle_bench.demo import plan, vmm, web
from rekindle_lab.cli import app as rekindle_lab
from rekindle_lab.models.parameters import DAY_S
from rekindle_lab.records import load, parse
from rekindle_lab.web import Answer

drawer = typer.Typer()
drawer.command()(vmm.main)
planner = typer.Typer()
planner.command()(plan.main)

STOP_MS = 3000
"""When the VMM's replacement stops the guest, after the client's start."""
WARM_GAP_MS = 14
"""The client's time without an answer around a warm replacement."""


def warm_record():
    return record("warm", stop_ms=STOP_MS, resume_ms=STOP_MS + 5, gap_ms=WARM_GAP_MS)


def saved_record():
    return record("saved", stop_ms=STOP_MS, resume_ms=STOP_MS + 1200, gap_ms=1300, rate=800)


def cold_record():
    return record("cold", stop_ms=STOP_MS, resume_ms=STOP_MS + 1500, gap_ms=5600, failed=7)


def write(folder, *records):
    paths = []
    for document in records:
        path = folder / f"{document['how']}.json"
        path.write_text(json.dumps(document))
        paths.append(str(path))
    return paths


def table_rows(lines):
    """Parses a printed table (heads, rule, rows) to a dict for each row; cells are at least two spaces apart."""
    head, _rule, *rows = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_draws_three_panels_and_prints_the_table(tmp_path):
    """The guest-stopped time is from stop to resume; a cold replacement has none."""
    out = tmp_path / "demo.png"
    files = write(tmp_path, warm_record(), saved_record(), cold_record())
    result = CliRunner().invoke(drawer, ["--out", str(out), *files])
    assert result.exit_code == 0, result.output
    columns = ("how", "QEMU", "guest-stopped time", "service gap", "requests lost")
    assert [tuple(row[column] for column in columns) for row in table_rows(result.output.splitlines())] == [
        ("warm", "7.2 -> 10.0", "5 ms", f"{WARM_GAP_MS} ms", "0"),
        ("saved", "7.2 -> 10.0", "1.2 s", "1.3 s", "0"),
        ("cold", "7.2 -> 10.0", "- (shut down, booted)", "5.6 s", "7"),
    ]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_record_is_named(tmp_path):
    """The error names the file and the missing key."""
    bad = warm_record()
    del bad["probe"]["gaps"]
    result = CliRunner().invoke(drawer, ["--out", str(tmp_path / "x.png"), *write(tmp_path, bad)])
    assert result.exit_code == 1
    assert "warm.json" in result.output and "gaps" in result.output


def test_the_gap_is_the_one_at_the_stop_not_the_longest_of_the_run():
    document = warm_record()
    before_stop_ns = (START_US + 500_000) * 1000
    document["probe"]["gaps"].insert(0, {"start_unix_ns": before_stop_ns, "length_us": 99_000})
    assert parse(document).gap_ms == WARM_GAP_MS


def test_throughput_counts_from_the_stop():
    """Answers per second in intervals of 0.1 s: 800 until the stop, 0 in the gap of 1.3 s, then 800 again."""
    edges_s, rates_per_s = parse(saved_record()).throughput()
    assert edges_s[0] == pytest.approx(-STOP_MS / 1000)
    rate_from = dict(zip(np.round(edges_s, 1), rates_per_s, strict=False))  # by the interval's start
    assert (rate_from[-3.0], rate_from[-0.1], rate_from[0.0], rate_from[1.2], rate_from[1.3]) == (800, 800, 0, 0, 800)


def test_no_record_without_vms(tmp_path):
    """A reboot of no VM is no record."""
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"how": "warm", "reboot": {"vms": []}, "probe": {}}))
    with pytest.raises(ValueError, match="not a record"):
        load(path)


FILE_BYTES = 10**6
S_PER_FILE_BEFORE = 0.1
"""Time between two answers before a reboot of the OS; the last one is as long before the command."""
WARM_BOOT_S = 10.0
"""From the command to a warm-cache reboot until the guest's services answer again."""
WARM_S_PER_FILE = 0.025
"""Time between two answers after that."""


def rebooted(how, boot_s, s_per_file, retained_bytes):
    """Returns a reboot of the OS; its first answer is one file's time after the services answer again."""
    before = [Answer(-n * S_PER_FILE_BEFORE, S_PER_FILE_BEFORE, FILE_BYTES) for n in range(50, 0, -1)]
    after = [Answer(boot_s + n * s_per_file, s_per_file, FILE_BYTES) for n in range(1, web.AFTER + 1)]
    return web.Reboot(how=how, answers=before + after, well=boot_s, end=after[-1].at, retained_bytes=retained_bytes)


def both_reboots():
    return [
        rebooted(web.COLD, boot_s=20.0, s_per_file=0.05, retained_bytes=0),
        rebooted(web.WARM, boot_s=WARM_BOOT_S, s_per_file=WARM_S_PER_FILE, retained_bytes=50_000_000),
    ]


def test_a_web_server_through_both_reboots_is_drawn_and_listed(tmp_path):
    """The server has 200 files; rates are 1 MB by the time per file."""
    assert table_rows(web.summary(both_reboots()).splitlines()) == [
        {
            "how": "cold",
            "services answer after": "20 s",
            "200 files served after": f"{20 + 200 * 0.05:g} s",
            "MB/s before": f"{1 / S_PER_FILE_BEFORE:g}",
            "MB/s of these files": f"{1 / 0.05:g}",
            "MB from retained cache": "0",
        },
        {
            "how": "warm-cache",
            "services answer after": f"{WARM_BOOT_S:g} s",
            "200 files served after": f"{WARM_BOOT_S + 200 * WARM_S_PER_FILE:g} s",
            "MB/s before": f"{1 / S_PER_FILE_BEFORE:g}",
            "MB/s of these files": f"{1 / WARM_S_PER_FILE:g}",
            "MB from retained cache": "50",
        },
    ]
    web.draw(both_reboots(), tmp_path / "web.png")
    assert (tmp_path / "web.png").read_bytes().startswith(b"\x89PNG")


def test_it_ends_with_the_plan_for_the_measurements(tmp_path):
    """The plan chooses the pair of ways with the shortest gaps, and `rekindle-lab plan` accepts the plan's file."""
    (tmp_path / "web.json").write_text(json.dumps(web.as_json(both_reboots())))
    out = tmp_path / "plan.toml"
    files = write(tmp_path, warm_record(), saved_record(), cold_record())
    result = CliRunner().invoke(planner, ["--web", str(tmp_path / "web.json"), "--out", str(out), *files])
    assert result.exit_code == 0, result.output
    _title, _head, _rule, *pairs = result.output.splitlines()
    assert len(pairs) == len(files) * len(both_reboots())
    (chosen,) = [line for line in pairs if "<- the plan" in line]
    assert chosen.split()[:2] == ["warm", "warm-cache"]

    usual = CliRunner().invoke(rekindle_lab, ["plan", str(out), "--json"])
    document = json.loads(usual.output)
    (vm,) = document["vms"]
    assert (vm["vmm"], vm["os"], document["reached"]) == ("warm", "warm-cache", True)
    vmm_interval_s, os_interval_s = 28 * DAY_S, 7 * DAY_S  # as `demo.plan` writes them
    vmm_gap_s = WARM_GAP_MS / 1000
    os_gap_s = S_PER_FILE_BEFORE + WARM_BOOT_S + WARM_S_PER_FILE  # from the last answer before to the first after
    os_reboots = (vmm_interval_s - vmm_gap_s) / os_interval_s  # the OS's timer stands still while the VMM is replaced
    down_s = vmm_gap_s + os_reboots * os_gap_s
    assert vm["availability"] == pytest.approx(1 - down_s / vmm_interval_s, rel=1e-9)


def test_a_plan_needs_the_measurements(tmp_path):
    """The error names a file of `demo.web` without the gap."""
    (tmp_path / "web.json").write_text('[{"how": "cold"}]')
    files = write(tmp_path, warm_record())
    result = CliRunner().invoke(
        planner, ["--web", str(tmp_path / "web.json"), "--out", str(tmp_path / "plan.toml"), *files]
    )
    assert result.exit_code == 1
    assert "web.json: not a file of demo.web: it has no 'gap_s'" in result.output
