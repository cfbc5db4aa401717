"""Topic `vmm`: figures, tables and plots from invented rows.

A guest's VMM (QEMU) is replaced: `warm` (RAM stays in place), `saved` (RAM to disk and back), `cold` (the guest is
booted anew), or by QEMU's own `cpr-transfer`, the peer.
"""

import json
from functools import partial

import numpy as np
import pytest
import typer
from row_files import write_rows
from typer.testing import CliRunner

from invented_record import START_US, record, steps
from rekindle_bench.__main__ import main
from rekindle_bench.report import Bar
from rekindle_bench.vmm import analysis, rows
from rekindle_bench.vmm.plan import FULL, QUICK, left_out
from rekindle_bench.vmm.rows import Row

app = typer.Typer()
app.command()(main)

# Guest-stopped times in ms of a guest with 512 MiB. Medians: 5 and 10 ms.
WARM_512 = [4.0, 5.0, 5.0, 6.0, 5.0, 5.5, 4.5, 5.0, 5.2, 4.8]
CPR_512 = [10.0, 9.0, 11.0, 10.0, 10.5, 9.5, 10.0, 10.2, 9.8, 10.0]
ALONE_US = [5000, 5001, 5002]
"""Durations of the reboot of the only VM of a host."""
ONE_OF_11_US = 8200
ALL_11_US = [40_000, 41_000, 42_000]
"""Durations of the reboot of one, and of all, of 11 VMs."""


def reboot(case, how, number, stopped_ms, *, mib=512, vms=1, vm="a", guest="micro", **more):
    """Returns a reboot at 1 s: suspended for a third of the stop, with a client's gap 2 ms longer than the stop."""
    stopped_us = int(stopped_ms * 1000)
    stop = START_US + 1_000_000
    third = stopped_ms / 3
    return Row(
        case=case,
        guest=guest,
        memory_mib=mib,
        vms=vms,
        how=how,
        round=number,
        vm=vm,
        stopped_us=stopped_us,
        stop_host_us=stop,
        resume_host_us=stop + stopped_us,
        total_us=more.pop("total_us", stopped_us),
        gap_us=stopped_us + 2000,
        gap_start_host_us=stop - 1000,
        gap_end_host_us=stop + stopped_us + 1000,
        answered=100,
        failed=0,
        connections_lost=0,
        steps=steps([("suspend", "save", 1000, third), ("renew", "load", 1000 + third, 2 * third)]),
        **more,
    )


def invented_rows(warm=WARM_512, cpr=CPR_512, sessions_lost=0, failed=0, changed=0):
    all_rows = [reboot("ram", "warm", i, value) for i, value in enumerate(warm)]
    all_rows += [reboot("ram", "cpr-transfer", i, value) for i, value in enumerate(cpr)]
    all_rows += [reboot("ram", "warm", i, value, mib=2048) for i, value in enumerate([5.0, 6.0, 7.0])]
    all_rows += [reboot("ram", "saved", i, value, mib=2048) for i, value in enumerate([1500.0, 1000.0, 1200.0])]
    all_rows += [reboot("sizes", "warm", i, value, mib=8192) for i, value in enumerate([5.0, 5.25, 5.5])]
    all_rows += [reboot("sizes", "warm", i, value, mib=512) for i, value in enumerate([5.5, 4.5, 5.0])]
    for number in range(3):
        all_rows.append(reboot("count", "warm", number, 5.0, mib=256, total_us=ALONE_US[number]))
        all_rows.append(reboot("solo", "warm", number, 8.0, mib=256, total_us=ONE_OF_11_US))
        for vm in range(11):
            all_rows.append(
                reboot("count", "warm", number, 20.0, mib=256, vms=11, vm=f"s{vm}", total_us=ALL_11_US[number])
            )
    for number in range(50):
        lost = sessions_lost if number == 7 else 0
        all_rows.append(reboot("losses", "warm", number, 6.0, guest="debian", sessions=5, sessions_lost=lost))
    all_rows.append(
        Row(
            case="load",
            guest="debian",
            memory_mib=1024,
            vms=1,
            how="warm",
            round=0,
            vm="l",
            answered=9000,
            failed=failed,
            connections_lost=0,
        )
    )
    all_rows += [reboot("memory", "warm", i, 5.0, memory_changed_bytes=changed) for i in range(3)]
    return all_rows


write = partial(write_rows, rows)


def figures_of(tmp_path, **changes):
    findings = analysis.figures(write(tmp_path / "vmm-raw.csv", invented_rows(**changes)), "vmm-raw.csv")
    assert findings.absent == []
    return {figure.id: figure for figure in findings.figures}


def test_known_rows_give_known_figures(tmp_path):
    """Figures are of medians; p95 is interpolated, as numpy does."""
    figures = figures_of(tmp_path)
    assert set(figures) == {
        "warm_vs_cpr_stopped",
        "warm_8g_vs_512m_stopped",
        "warm_11_vms_total",
        "warm_vs_saved_2g",
        "warm_losses_50",
        "warm_memory_changed",
    }
    cpr = figures["warm_vs_cpr_stopped"].as_json()
    assert cpr["value"] == 0.5
    assert cpr["ratio_of"] == {"ours": 5.0, "peer": 10.0}
    assert (cpr["n"], cpr["n_peer"], cpr["met"], cpr["verdict"]) == (10, 10, True, "better")
    assert cpr["p95"] == pytest.approx(np.percentile(WARM_512, 95) / np.percentile(CPR_512, 95), rel=1e-5)
    assert cpr["ratio_ci95"][0] <= 0.5 <= cpr["ratio_ci95"][1] < 0.6
    assert cpr["raw"] == "vmm-raw.csv"
    assert figures["warm_8g_vs_512m_stopped"].value == pytest.approx(5.25 / 5.0)
    many = figures["warm_11_vms_total"].as_json()
    alone_us, all_us = ALONE_US[1], ALL_11_US[1]  # the medians
    assert (many["value"], many["unit"], many["n"], many["met"]) == (all_us / 1e6, "s", 3, True)
    assert many["ratio_to_one_among_all"] == all_us / ONE_OF_11_US
    assert "verdict" not in many  # 11 of ours against one of ours: there is no peer
    assert many["ratio"] == pytest.approx(all_us / alone_us, rel=1e-4)
    assert figures["warm_vs_saved_2g"].value == pytest.approx(6.0 / 1200.0)
    assert (figures["warm_losses_50"].value, figures["warm_losses_50"].n) == (0, 50)
    assert figures["warm_memory_changed"].value == 0
    assert all(figure.met for figure in figures.values())


def test_a_worse_result_is_reported_as_worse(tmp_path):
    """The samples of warm and cpr-transfer are exchanged."""
    raw = tmp_path / "vmm-raw.csv"
    write(raw, invented_rows(warm=CPR_512, cpr=WARM_512))
    result = CliRunner().invoke(app, ["vmm", "--from-raw", str(raw), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.output.splitlines() if line.startswith("warm_vs_cpr_stopped"))
    assert "MISSED" in line
    assert line.endswith("worse")
    figure = json.loads(result.output.splitlines()[-1])["figures"]["warm_vs_cpr_stopped"]
    assert (figure["value"], figure["met"], figure["verdict"]) == (2.0, False, "worse")
    assert figure["ratio_ci95"][0] > 1


@pytest.mark.parametrize(
    ("changes", "id_", "value"),
    [
        ({"sessions_lost": 2}, "warm_losses_50", 2),
        ({"failed": 3}, "warm_losses_50", 3),
        ({"sessions_lost": 1, "failed": 3}, "warm_losses_50", 4),
        ({"changed": 4096}, "warm_memory_changed", 4096),
    ],
)
def test_every_loss_counts(tmp_path, changes, id_, value):
    """Sessions, requests and connections are added."""
    figure = figures_of(tmp_path, **changes)[id_]
    assert figure.value == value
    assert not figure.met


def test_eleven_vms_must_stay_under_both_bars(tmp_path):
    """11 VMs take 100 us more than 11 times one VM, but less than 1 s. Five figures have no rows."""
    all_rows = [row for row in invented_rows() if row.case == "count"]
    for row in all_rows:
        if row.vms == 11:
            row.total_us = ALONE_US[1] * 11 + 100
    findings = analysis.figures(write(tmp_path / "r.csv", all_rows), "r.csv")
    (figure,) = findings.figures
    assert figure.value < 1.0
    assert not figure.met  # 11 times one VM is not under 11 times
    assert len(findings.absent) == 5


def test_an_analysis_again_gives_the_same_and_draws(tmp_path):
    """Resampling has a fixed seed, so the JSON is equal byte for byte."""
    raw = tmp_path / "raw" / "vmm-raw.csv"
    raw.parent.mkdir()
    write(raw, invented_rows())
    (raw.parent / "vmm-run.json").write_text(
        json.dumps({"command": "make bench TOPIC=vmm", "versions": {"qemu": "10"}, "left_out": ["x"], "errors": []})
    )
    records = [
        record("warm", stop_ms=3000, resume_ms=3005, gap_ms=14),
        record("cold", stop_ms=2500, resume_ms=4000, gap_ms=5600, failed=7),
    ]
    (raw.parent / "vmm-breakdown.json").write_text(json.dumps(records))
    outputs = []
    for name in ("one", "two"):
        result = CliRunner().invoke(app, ["vmm", "--from-raw", str(raw), "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        outputs.append(result.output.splitlines()[-1])
        document = json.loads(outputs[-1])
        assert document == json.loads((tmp_path / name / "vmm.json").read_text())
        assert document["plots"] == ["vmm-ram.png", "vmm-count.png", "vmm-downtime.png", "vmm-breakdown.png"]
        for plot in document["plots"]:
            assert (tmp_path / name / plot).read_bytes().startswith(b"\x89PNG")
        assert document["versions"] == {"qemu": "10"}
        assert document["left_out"] == ["x"]
        assert (tmp_path / name / "vmm-raw.csv").exists()
    assert outputs[0] == outputs[1]


def test_tasks_before_and_after(tmp_path):
    """`reboot` suspends for a third of the stop, and the client is answered 1 ms after the resume."""
    frame = write(tmp_path / "r.csv", [reboot("ram", "saved", 0, 900.0), reboot("ram", "cpr-transfer", 0, 3.0)])
    times = analysis.tasks(frame).set_index("how")
    assert times.loc["saved", "pre_ms"] == pytest.approx(300)
    assert times.loc["saved", "post_ms"] == pytest.approx(601)  # until the client is answered, 1 ms after the resume
    assert times.loc["saved", "stopped_ms"] == 900
    assert times.loc["cpr-transfer", "stopped_ms"] == 3
    assert times.loc["cpr-transfer", ["pre_ms", "post_ms"]].isna().all()


def test_an_unrelated_file_is_rejected(tmp_path):
    """The error states that it is not a raw file of the topic."""
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a raw file"):
        rows.read(path)


def test_omissions_of_a_quick_run_are_listed():
    """The full plan omits nothing."""
    assert left_out(FULL) == []
    text = "\n".join(left_out(QUICK))
    assert "micro with 8G: all of it" in text
    assert "4 small VMs: all of it" in text
    assert "reboots in a row under load: 10 of 50" in text


def test_bars():
    """A limit is met exactly unless its operator is `<`."""
    assert Bar(1.0).met(1.0)
    assert not Bar(1.0, "<").met(1.0)
    assert Bar(0.0, "==").met(0)


def test_wrong_usage_is_rejected(tmp_path):
    """Exit status 2, as the module `__main__` documents."""
    assert CliRunner().invoke(app, ["nonsense"]).exit_code == 2
    assert CliRunner().invoke(app, ["vmm", "--only", "nonsense", "--out", str(tmp_path)]).exit_code == 2
