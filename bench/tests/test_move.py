"""Topic `move` with invented rows: the figure, the table, and the peer's command line.

Ways to move a guest to another host: `move` (Rekindle, through an object store; `move-local` through a folder), QEMU's
live migration as the peer (`live`, or `live-20ms` with a limit of the downtime), `non-live` (stopped meanwhile). A live
migration *converges* if the rest of the memory to send becomes small enough for the limit.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle_bench.move import analysis, cases
from rekindle_bench.move.plan import FULL, QUICK, left_out
from rekindle_bench.move.rows import Row, read
from rekindle_bench.rows import RowFile
from rekindle_lab.cli import app
from rekindle_lab.models import moves
from rekindle_lab.models.parameters import ParameterError
from rekindle_lab.peers import migrate
from rekindle_lab.rekindle import Probe

SOURCE_COMMAND_LINE = [
    "/usr/bin/qemu-system-x86_64",
    *("-pidfile", "/run/a/vmm-1/qemu.pid", "-global", "migration.send-configuration=off"),
    *("-object", "memory-backend-file,id=ram,size=512,mem-path=/ram/a.ram,share=on"),
    *("-chardev", "socket,id=console,path=/run/a/vmm-1/console.sock,logfile=/run/a/console.log"),
    *("-netdev", "tap,id=net0,fd=40,vhost=off", "-incoming", "defer", "-S"),
]


def test_the_target_has_the_hardware_and_its_own_files():
    """The destination's command line is the source's, with other paths and tap, and without `-S`."""
    vm = migrate.Vm("qemu", SOURCE_COMMAND_LINE, "/run/a/vmm-1")
    arguments = migrate.destination_arguments(vm, Path("/b"), Path("/ram/b.ram"), 7)
    text = " ".join(arguments)
    assert arguments[-2:] == ["-incoming", "defer"] and text.count("-incoming") == 1 and "-S" not in arguments
    assert "tap,id=net0,fd=7,vhost=off" in arguments
    # Source and destination must agree about the stream's configuration section.
    assert "migration.send-configuration=off" in arguments
    assert "mem-path=/ram/b.ram" in text and "/b/qemu.pid" in arguments and "logfile=/b/console.log" in text
    assert "/run/a" not in text and "/ram/a" not in text


# Guest-stopped times in ms of an idle guest; round n adds n us. Under load, `move` takes twice as long.
MOVE_MS, LOCAL_MS, LIVE_MS, LIVE_20_MS, LIVE_2_MS, NON_LIVE_MS = 40, 20, 100, 50, 10, 700
PAUSES_MS = 9
"""Shorter stops of `move` before that, in total."""
ROUNDS = 8


@pytest.fixture
def frame(tmp_path):
    rows = RowFile(tmp_path / "move-raw.csv", Row)
    for number in range(ROUNDS):
        for load, factor in (("idle", 1), ("dirty 20", 2)):
            common = {"case": "moves", "memory_mib": 512, "load": load, "round": number}
            times = {"total_us": 900_000, "whole_us": 1_000_000, "before_per_s": 400.0}
            ours = Row(
                how="move",
                store="s3",
                stopped_us=(MOVE_MS * 1000 + number) * factor,
                during_per_s=300.0,
                **common,
                **times,
            )
            ours.steps = [{"step": "read", "us": 5000}, {"step": "there", "us": 30_000}]
            ours.steps.append({"step": "there: load its devices", "us": 9000})
            ours.pauses_us, ours.rounds, ours.last_bytes = PAUSES_MS * 1000, 3, 4096
            rows.append(ours)
            live_us, live_20_us = LIVE_MS * 1000 + number, LIVE_20_MS * 1000 + number
            rows.append(Row(how="live", store="", stopped_us=live_us, during_per_s=200.0, **common, **times))
            rows.append(Row(how="live-20ms", store="", stopped_us=live_20_us, converged=1, **common, **times))
            # The best way while it converges; under load it once did not converge.
            stuck = load != "idle" and number == 3
            fastest = None if stuck else LIVE_2_MS * 1000 + number
            rows.append(Row(how="live-2ms", store="", stopped_us=fastest, converged=int(not stuck), **common))
            local_us = LOCAL_MS * 1000 + number
            rows.append(Row(how="move-local", store="disk", stopped_us=local_us, **common, **times))
            rows.append(Row(how="non-live", store="", stopped_us=NON_LIVE_MS * 1000, **common, **times))
    rows.close()
    return read(rows.path)


def test_the_figure_is_of_a_guest_that_works(frame):
    """The peer is the best of the ways that always converge: `live-2ms` if the guest is idle, else `live-20ms`."""
    findings = analysis.figures(frame, "move-raw.csv")
    [figure] = findings.figures
    assert figure.id == "move_stopped_vs_live" and not figure.met and figure.n == ROUNDS
    assert (
        figure.value == pytest.approx(2 * MOVE_MS / LIVE_20_MS, rel=0.01) and "limit 20 ms" in figure.contrast.peer_is
    )
    assert figure.extra["ratio_dirty_512m_live"] == pytest.approx(2 * MOVE_MS / LIVE_MS, rel=0.01)
    assert figure.extra["ratio_idle_512m"] == pytest.approx(MOVE_MS / LIVE_2_MS, rel=0.01)
    assert figure.extra["ratio_idle_512m_s3_to_local"] == pytest.approx(MOVE_MS / LOCAL_MS, rel=0.01)
    assert findings.absent == ["live-2ms, 512M, dirty 20: 1 of 8 did not converge"]
    without_peers = analysis.figures(frame[frame["how"] == "move"], "move-raw.csv")
    assert not without_peers.figures and "live" in without_peers.absent[0]


def test_the_tables_have_the_loss_of_throughput(frame):
    """Answers per second: 400 before, 300 (a quarter less) during `move`, 200 (half) during `live`."""
    lines = {(line["load"], line["how"]): line for line in analysis.summary(frame)}
    assert lines["idle", "move"]["degraded"] == pytest.approx(0.25)
    assert lines["idle", "live"]["degraded"] == pytest.approx(0.5)
    assert lines["idle", "live"]["paused before ms"] is None
    assert lines["dirty 20", "live-2ms"]["not converged"] == 1 and lines["dirty 20", "live-2ms"]["n"] == 7
    [idle, _] = analysis.pauses(frame)
    keys = ("guest", "load", "how", "n")
    assert {name: value for name, value in idle.items() if name not in keys} == {"read ms": 5.0, "there ms": 30.0}
    [idle, _] = analysis.there(frame)
    assert {name: value for name, value in idle.items() if name not in keys} == {"load its devices ms": 9.0}


def test_the_models_take_their_figures_from_it(frame, tmp_path):
    """`rekindle-lab model --moves` reads the table of this topic."""
    path = tmp_path / "move.json"
    path.write_text(json.dumps({"tables": {moves.TABLE: analysis.summary(frame)}}))
    vms = 3
    parameters, notes = moves.read_moves(path, "512M", "dirty 20", vms)
    assert {"migration", "move", "move-local", "live", "live-20ms"} == set(parameters)
    non_live_s = NON_LIVE_MS / 1000
    assert parameters["migration"].vmm_downtime_s == pytest.approx(non_live_s)
    assert parameters["migration"].degraded_s == pytest.approx((vms - 1) * non_live_s)  # while the others move
    ours = parameters["move"]
    assert ours.vmm_downtime_s == pytest.approx((2 * MOVE_MS + PAUSES_MS) / 1000, rel=1e-3)
    # While all of them move, 1 s each, a quarter less is served.
    assert (ours.degraded_rate, ours.degraded_s) == (pytest.approx(0.25), pytest.approx(vms * 1.0))
    assert all(technique.spare_hosts == 1 for technique in parameters.values())
    assert any("non-live" in note for note in notes) and "left out, since not all of them converged: live-2ms" in notes
    options = ["--moves", str(path), "--move-vms", "3", "--json"]
    result = CliRunner().invoke(app, ["model", "--paper", "cluster", *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    names = [row["technique"] for row in document["techniques"]]
    assert {"warm", "move", "live-20ms"} <= set(names) and names.count("migration") == 1
    with pytest.raises(ParameterError, match=r"no guest '8G' .* 512M with load idle"):
        moves.read_moves(path, "8G", "idle", 3)
    path.write_text("{}")
    with pytest.raises(ParameterError, match="TOPIC=move"):
        moves.read_moves(path, "512M", "idle", 3)


def test_rates_are_of_whole_intervals_before_the_command_and_until_the_stop():
    """The probe starts at 5 s; 40 answers per 100 ms until 6 s, then 20."""
    intervals = [{"start_ms": 100 * n, "answered": 40 if n < 10 else 20} for n in range(30)]
    probe = Probe({"interval_ms": 100, "started_unix_ns": 5_000_000_000, "intervals": intervals})
    row = Row(case="moves", memory_mib=512, load="idle", how="move", store="disk", round=0)
    cases._fill_service_rates(row, probe, 6.0, 7.0)
    assert (row.before_per_s, row.during_per_s) == (pytest.approx(400.0), pytest.approx(200.0))
    # The measurement ended before one interval had passed.
    cases._fill_service_rates(row, probe, 6.0, 6.05)
    assert row.during_per_s is None


def test_omissions_of_a_quick_run_are_listed():
    """The quick plan has one size of guest and fewer rounds."""
    assert left_out(FULL) == []
    lines = left_out(QUICK)
    assert any("2G" in line for line in lines)
    assert any(f"{QUICK.rounds} of {FULL.rounds}" in line for line in lines) and QUICK.rounds < FULL.rounds
