"""Topic `move` on rows that are made up: the figure, the table, and the peer's command line."""

from pathlib import Path

import pytest

from rekindle_lab.bench.move import analysis, cases
from rekindle_lab.bench.move.plan import FULL, QUICK, left_out
from rekindle_lab.bench.move.rows import Row, read
from rekindle_lab.bench.rows import RowFile
from rekindle_lab.peers import migrate
from rekindle_lab.rekindle import Probe

LINE = [
    "/usr/bin/qemu-system-x86_64",
    *("-pidfile", "/run/a/vmm-1/qemu.pid", "-global", "migration.send-configuration=off"),
    *("-object", "memory-backend-file,id=ram,size=512,mem-path=/ram/a.ram,share=on"),
    *("-chardev", "socket,id=console,path=/run/a/vmm-1/console.sock,logfile=/run/a/console.log"),
    *("-netdev", "tap,id=net0,fd=40,vhost=off", "-incoming", "defer", "-S"),
]


def test_the_target_has_the_hardware_and_its_own_files():
    vm = migrate.Vm("qemu", LINE, "/run/a/vmm-1")
    out = migrate.arguments(vm, Path("/b"), Path("/ram/b.ram"), 7)
    text = " ".join(out)
    assert out[-2:] == ["-incoming", "defer"] and text.count("-incoming") == 1 and "-S" not in out
    assert "tap,id=net0,fd=7,vhost=off" in out
    # Both sides have to be of one mind about the stream.
    assert "migration.send-configuration=off" in out
    assert "mem-path=/ram/b.ram" in text and "/b/qemu.pid" in out and "logfile=/b/console.log" in text
    assert "/run/a" not in text and "/ram/a" not in text


@pytest.fixture
def frame(tmp_path):
    rows = RowFile(tmp_path / "move-raw.csv", Row)
    for number in range(8):
        for load, factor in (("idle", 1), ("dirty 20", 2)):
            common = {"case": "moves", "memory_mib": 512, "load": load, "round": number}
            times = {"total_us": 900_000, "whole_us": 1_000_000, "before_per_s": 400.0}
            ours = Row(
                how="move", store="disk", stopped_us=(40_000 + number) * factor, during_per_s=300.0, **common, **times
            )
            ours.steps = [{"step": "read", "us": 5000}, {"step": "there", "us": 30_000}]
            ours.pauses_us, ours.rounds, ours.last_bytes = 9000, 3, 4096
            rows.append(ours)
            rows.append(Row(how="live", store="", stopped_us=100_000 + number, during_per_s=200.0, **common, **times))
    rows.close()
    return read(rows.path)


def test_the_figure_is_of_a_guest_that_works(frame):
    found = analysis.figures(frame, "move-raw.csv")
    [figure] = found.figures
    assert figure.id == "move_stopped_vs_live" and figure.met and figure.n == 8
    assert figure.value == pytest.approx(0.8, rel=0.01)
    assert figure.extra["ratio_idle_512m"] == pytest.approx(0.4, rel=0.01)
    lacking = analysis.figures(frame[frame["how"] == "move"], "move-raw.csv")
    assert not lacking.figures and "live" in lacking.absent[0]


def test_the_tables_say_how_much_less_was_served(frame):
    lines = {(line["load"], line["how"]): line for line in analysis.summary(frame)}
    assert lines["idle", "move"]["degraded"] == pytest.approx(0.25)
    assert lines["idle", "live"]["degraded"] == pytest.approx(0.5)
    assert lines["idle", "live"]["paused before ms"] is None
    [idle, _] = analysis.pauses(frame)
    assert (idle["read ms"], idle["there ms"]) == (30.0, 5.0) or (idle["read ms"], idle["there ms"]) == (5.0, 30.0)


def test_rates_are_of_whole_intervals_before_the_command_and_until_the_stop():
    intervals = [{"start_ms": 100 * n, "answered": 40 if n < 10 else 20} for n in range(30)]
    probe = Probe({"interval_ms": 100, "started_unix_ns": 5_000_000_000, "intervals": intervals})
    row = Row("moves", 512, "idle", "move", "disk", 0)
    cases._service(probe, 6.0, 7.0, row)
    assert (row.before_per_s, row.during_per_s) == (pytest.approx(400.0), pytest.approx(200.0))
    # Over before one interval was.
    cases._service(probe, 6.0, 6.05, row)
    assert row.during_per_s is None


def test_what_a_quick_run_leaves_out_is_said():
    assert left_out(FULL) == []
    assert any("2G" in line for line in left_out(QUICK)) and any("3 of 12" in line for line in left_out(QUICK))
