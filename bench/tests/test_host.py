"""Topic `host`: figures, tables and plots from invented rows, and the evaluation of timelines.

A host is rebooted `warm` (its guests are suspended, their RAM stays in place over kexec, and they resume) or `cold`.
"""

import json

import pytest

from rekindle_bench.host import analysis, plots
from rekindle_bench.host.emulated_hosts import finished_rounds
from rekindle_bench.host.fault_points import FAULTS
from rekindle_bench.host.plan import FULL, QUICK, left_out
from rekindle_bench.host.reboot import Milestones, last_reboot, stages
from rekindle_bench.host.rows import Row, read
from rekindle_bench.rows import RowFile

START = 1_800_000_000_000_000
"""A time in microseconds since 1970."""
S = 1_000_000
"""Microseconds of a second."""
SUSPEND_S = 0.2
RESUME_S, RESUME_LARGE_S = 0.5, 0.55
"""Resume of a guest of 128 MiB and of 1 GiB."""
WARM_S, COLD_S, FIRMWARE_S = (20.0, 21.0, 22.0), 100.0, 2
"""Downtimes in the case `counts`: of each warm reboot, of all cold ones, and the share of the firmware in these."""
ROUNDS, FAULT_GUESTS = 3, 2


def reboot(case, how, number, *, vms=1, mib=128, downtime=40.0, resume=RESUME_S, lost=0, **more):
    """Returns the rows of one reboot. Times are in s; each further guest has a downtime of 1 s less."""
    for n in range(vms):
        yield Row(
            case=case,
            how=how,
            vms=vms,
            memory_mib=mib,
            round=number,
            vm=f"guest{n}",
            gap_us=int((downtime - n) * S),
            outcome=more.pop("outcome", "booted" if how == "cold" else "kept"),
            wanted="booted" if how == "cold" else "kept",
            sessions=1,
            sessions_lost=lost,
            suspend_us=int(SUSPEND_S * S) if how != "cold" else None,
            resume_us=int(resume * S) if how != "cold" else None,
            firmware_us=FIRMWARE_S * S if how != "warm" else None,
            kernel_us=4 * S,
            userspace_us=10 * S,
            **more,
        )


def invented_rows():
    """Returns some rows of each case."""
    for number in range(ROUNDS):
        for mib, resume in ((128, RESUME_S), (1024, RESUME_LARGE_S)):
            yield from reboot("sizes", "warm", number, mib=mib, resume=resume)
        for vms in (1, 2, 4):
            yield from reboot("counts", "warm", number, vms=vms, downtime=WARM_S[number])
            yield from reboot("counts", "cold", number, vms=vms, downtime=COLD_S)
        yield from reboot("losses", "warm", number, vms=2)
        yield from reboot("faults", "warm", number, vms=FAULT_GUESTS, fault=str(FAULTS[number]))
        yield from reboot("faults", "warm", number, vms=FAULT_GUESTS, fault=str(FAULTS[number]), where="direct")


@pytest.fixture
def write(tmp_path):
    def to(rows):
        file = RowFile(tmp_path / "host-raw.csv", Row)
        for row in rows:
            file.append(row)
        file.close()
        return file.path

    return to


def test_figures_of_the_table(write):
    findings = analysis.figures(read(write(invented_rows())), "host-raw.csv")
    by_id = {figure.id: figure for figure in findings.figures}
    assert not findings.absent
    both = by_id["host_suspend_resume"]
    assert (both.value, both.n) == (pytest.approx(SUSPEND_S + RESUME_S), ROUNDS)
    assert both.contrast.result.ratio == pytest.approx((SUSPEND_S + RESUME_LARGE_S) / (SUSPEND_S + RESUME_S))
    assert both.met
    assert by_id["host_warm_vs_cold"].value == pytest.approx(WARM_S[1] / COLD_S)  # of the medians
    assert by_id["host_warm_vs_cold"].extra["cold_firmware_share"] == pytest.approx(FIRMWARE_S / COLD_S)
    assert (by_id["host_tcp_lost"].value, by_id["host_tcp_lost"].n) == (0, ROUNDS)
    lost = by_id["host_guests_lost"]
    assert (lost.value, lost.n) == (0, 2 * ROUNDS)  # on this machine ("direct") and in an emulated host
    assert lost.extra == {"reboots_direct": ROUNDS, "reboots_emulated": ROUNDS, "guests": 2 * ROUNDS * FAULT_GUESTS}
    assert all(figure.met for figure in findings.figures)


def test_one_guest_or_one_connection_that_is_lost_is_missed(write):
    """A guest that has booted instead of continuing has lost its memory."""
    rows = [*invented_rows(), *reboot("losses", "warm", 9, lost=1), *reboot("faults", "warm", 9, outcome="booted")]
    findings = analysis.figures(read(write(rows)), "host-raw.csv")
    missed = {figure.id for figure in findings.figures if not figure.met}
    assert missed == {"host_tcp_lost", "host_guests_lost"}


def test_nothing_measured_is_no_figure(write):
    """One warm reboot alone is not enough for any of the four figures."""
    findings = analysis.figures(read(write(reboot("counts", "warm", 0))), "host-raw.csv")
    assert not findings.figures
    assert len(findings.absent) == 4


def test_tables_and_plots(write, tmp_path):
    """Each fault point was hit in two reboots; a cold reboot's outcome `booted` is as wanted."""
    frame = read(write(invented_rows()))
    summary = analysis.summary(frame)
    cold = next(line for line in summary if line["how"] == "cold" and line["guests"] == "4 x 128M")
    assert (cold["n"], cold["downtime"], cold["firmware"], cold["as wanted"]) == (
        ROUNDS,
        COLD_S,
        FIRMWARE_S,
        "12 of 12",
    )
    assert all(line["kept"] == 2 and line["gone"] == 0 for line in analysis.by_fault(frame))
    probe = {
        "interval_ms": 500,
        "started_unix_ns": START * 1000,
        "intervals": [{"start_ms": 500 * n, "answered": 25 * (n < 4 or n > 20)} for n in range(30)],
    }
    records = [
        {"how": how, "vms": 4, "command_us": START, "stages": {"kernel_us": S}, "probe": probe}
        for how in ("warm", "cold")
    ]
    drawn = plots.draw(frame, tmp_path) + plots.draw_throughput(records, tmp_path)
    assert drawn == [f"host-figure{n}.png" for n in (5, 6, 7, 8)]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in drawn)


def test_a_resumed_run_continues_after_complete_reboots(write):
    """Reboot 1 has the row of only one of its two guests, so it is repeated."""
    rows = [*reboot("counts", "warm", 0, vms=2), *list(reboot("counts", "warm", 1, vms=2))[:1]]
    assert finished_rounds(write(rows)) == {("counts", "warm", 2, 128, "emulated"): 1}


def entry(operation, phase, step, start_s, us):
    return {
        "vm": "a",
        "operation": operation,
        "phase": phase,
        "step": step,
        "start_mono_ns": int(start_s * 1e9),
        "start_host_us": int(start_s * S),
        "us": us,
    }


SUSPEND = [
    entry("host suspend --how warm", "prepare", "digest memory ahead", 390, 3 * S),
    entry("host suspend --how warm", "suspend", "stop", 400, 100_000),
    entry("host suspend --how warm", "suspend", "sync and commit", 400.1, 200_000),
]
RESUME = [
    entry("host resume", "prepare", "wait for its bridges", 14, 2 * S),
    entry("host resume", "renew", "load", 16, 600_000),
    entry("host resume", "resume", "resume", 16.6, 100_000),
    entry("host resume", "settle", "record", 16.7, 5 * S),
]


def test_only_the_last_reboot_counts():
    """A timeline also has the steps of earlier reboots and of other operations."""
    run = [entry("run", "resume", "start", 1, 5)]
    assert [e["step"] for e in last_reboot([*run, *SUSPEND, *RESUME])] == [e["step"] for e in SUSPEND + RESUME]
    again = last_reboot([*SUSPEND, *RESUME, *SUSPEND, *RESUME])
    assert len(again) == len(SUSPEND + RESUME)
    assert last_reboot(run) == []


def test_stages_of_a_warm_and_of_a_cold_reboot():
    """Suspend: from 400 s to 400.3 s. User space: from 4 s (its start) to 16 s (the bridges), by the kernel's clock.

    Resume: from 16 s to 16.7 s. The other stages are differences of the given times.
    """
    warm = stages(
        [[*SUSPEND, *RESUME]],
        Milestones(
            command_us=START,
            silent_us=START + 5 * S,
            saved_us=START + 6 * S,
            reset_us=None,
            kernel_us=START + 8 * S,
        ),
        kernel_to_userspace_us=4 * S,
    )
    assert warm == {
        "services_us": 5 * S,
        "suspend_us": 300_000,
        "down_us": 2 * S,
        "kernel_us": 4 * S,
        "userspace_us": 12 * S,
        "resume_us": 700_000,
        "ahead_us": 3 * S,
    }
    cold = stages(
        [[]],
        Milestones(
            command_us=START,
            silent_us=START + 5 * S,
            saved_us=START + 6 * S,
            reset_us=START + 9 * S,
            kernel_us=START + 12 * S,
        ),
        kernel_to_userspace_us=4 * S,
    )
    assert cold == {"services_us": 5 * S, "down_us": 3 * S, "firmware_us": 3 * S, "kernel_us": 4 * S}


def test_a_quick_plan_lists_its_omissions():
    """The full plan omits nothing."""
    assert left_out(FULL) == []
    lines = "\n".join(left_out(QUICK))
    for word in ("1 guest with 1G", "guests: 2", "connections open", "with a fault"):
        assert word in lines
    assert json.dumps(left_out(QUICK))
