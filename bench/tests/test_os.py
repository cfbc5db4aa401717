"""Topic `os`: figures, tables and plots from invented rows.

Ways to reboot a guest's OS: `cold`; `kexec` (the kernel starts the next one, without firmware and boot loader); by a
*phase*, a snapshot that the guest has saved at a point of an earlier boot, here of `services` (late in the boot).
With `-frozen` the guest is not shut down first. `qboot` is a peer: a fast firmware.
"""

import json
from functools import partial

import pytest
import typer
from row_files import write_rows
from typer.testing import CliRunner

from invented_record import START_US
from rekindle_bench.__main__ import main
from rekindle_bench.os import analysis, rows
from rekindle_bench.os.rows import Row

app = typer.Typer()
app.command()(main)
write = partial(write_rows, rows)
ROUNDS = 10
MEDIAN_ROUND_S = (ROUNDS - 1) / 2 / 1000
"""Round n takes n ms longer, in one of its stages; this is the median of that."""
SHUT_S, NEW_QEMU_S, FIRMWARE_S, LOADER_S, KEXEC_LOADER_S, KERNEL_S, USER_S = 2.0, 0.2, 0.5, 1.3, 0.5, 2.0, 4.0
"""Stages of `booted`: shut down, start QEMU, firmware, boot loader (or the jump of kexec), kernel, user space."""
COLD_S = SHUT_S + NEW_QEMU_S + FIRMWARE_S + LOADER_S + KERNEL_S + USER_S + MEDIAN_ROUND_S
KEXEC_S = SHUT_S + KEXEC_LOADER_S + KERNEL_S + USER_S + MEDIAN_ROUND_S
PHASE_SHUT_S, FROZEN_SHUT_S, LOAD_S, CONTINUE_S = 0.4, 0.1, 0.08, 0.1
"""Stages of `restored`: shut down (or freeze), load the snapshot, run until the first answer."""
LEAKED_KIB = 64 << 10
REMAINING_KIB = 3277
"""What a reboot by a phase does not recover of the leak: 5 %."""


def booted(guest, how, number):
    """Returns a row of a boot: each stage ends at a time of its own; kexec has no QEMU start and no firmware."""
    row = Row(
        case="reboot", guest=guest, memory_mib=512, how=how, round=number, first_us=20_000, silent_host_us=START_US
    )
    if how == "kexec":
        stages = {"kernel": SHUT_S + KEXEC_LOADER_S, "user": KERNEL_S, "served": USER_S}
    else:
        stages = {
            "ended": SHUT_S,
            "running": NEW_QEMU_S,
            "loader": FIRMWARE_S,
            "kernel": LOADER_S,
            "user": KERNEL_S,
            "served": USER_S,
        }
    at_us = START_US + number * 1000
    for stage, seconds in stages.items():
        at_us += round(seconds * 1e6)
        setattr(row, f"{stage}_host_us", at_us)
    row.gap_us = at_us - START_US
    return row


def restored(guest, how, number, *, case="reboot", shut_s=PHASE_SHUT_S):
    """Returns a row of a reboot by the phase that is named in `how`."""
    row = Row(
        case=case,
        guest=guest,
        memory_mib=512,
        how=how,
        round=number,
        first_us=50_000,
        silent_host_us=START_US,
        candidate=how.removeprefix("phase-"),
    )
    row.ended_host_us = START_US + round(shut_s * 1e6)
    row.load_us = round(LOAD_S * 1e6) + number * 1000
    row.running_host_us = row.ended_host_us + row.load_us
    row.served_host_us = row.running_host_us + round(CONTINUE_S * 1e6)
    row.gap_us = row.served_host_us - START_US
    return row


def leaked(guest, how, number, remaining_kib):
    """Returns a row of a reboot after a leak; slabs are the kernel's memory of its own objects."""
    row = restored(guest, how, number, case="leak")
    row.leaked_bytes = LEAKED_KIB << 10
    row.slab_before_kib = 20_000
    row.slab_leaked_kib = row.slab_before_kib + LEAKED_KIB
    row.slab_after_kib = row.slab_before_kib + remaining_kib
    row.available_before_kib, row.available_leaked_kib, row.available_after_kib = 400_000, 334_000, 400_000
    return row


def by_qboot(number):
    row = Row(case="peers", guest="micro", memory_mib=512, how="qboot", round=number, gap_us=10**6, first_us=10**4)
    row.silent_host_us = row.ended_host_us = START_US
    row.served_host_us = START_US + 10**6
    return row


def invented_rows():
    all_rows = []
    for number in range(ROUNDS):
        all_rows += [booted("debian", "cold", number), booted("debian", "kexec", number)]
        all_rows += [booted("immutable", "cold", number), restored("immutable", "phase-services", number)]
        all_rows.append(restored("immutable", "phase-services-frozen", number, shut_s=FROZEN_SHUT_S))
        all_rows.append(leaked("micro", "cold", number, remaining_kib=-100))
        all_rows.append(leaked("immutable", "phase-services", number, REMAINING_KIB))
        all_rows += [restored("micro", "phase-services", number, case="peers"), by_qboot(number)]
    return all_rows


def test_known_rows_give_known_figures(tmp_path):
    findings = analysis.figures(write(tmp_path / "r.csv", invented_rows()), "r.csv")
    by_id = {figure.id: figure for figure in findings.figures}
    kexec = by_id["kexec_vs_cold"]
    assert kexec.value == pytest.approx(KEXEC_S / COLD_S, rel=1e-3) and not kexec.met and kexec.n == ROUNDS
    assert kexec.contrast.result.low <= kexec.value <= kexec.contrast.result.high
    assert kexec.extra["cold_before_kernel_s"] == pytest.approx(NEW_QEMU_S + FIRMWARE_S + LOADER_S)
    assert kexec.extra["kexec_from_kernel_s"] == pytest.approx(KERNEL_S + USER_S)
    assert kexec.extra["cold_from_kernel_s"] == pytest.approx(KERNEL_S + USER_S)
    late, late_s = by_id["phase_late_vs_cold"], LOAD_S + CONTINUE_S + MEDIAN_ROUND_S
    assert late.value == pytest.approx((PHASE_SHUT_S + late_s) / COLD_S, rel=1e-3) and late.met
    assert late.extra["ratio_without_shutting_down"] == pytest.approx(late_s / (COLD_S - SHUT_S), rel=1e-2)
    frozen = by_id["phase_late_frozen_vs_cold"]
    assert frozen.value == pytest.approx((FROZEN_SHUT_S + late_s) / COLD_S, rel=1e-3) and frozen.met
    load, load_ms = by_id["phase_restore_ms"], 1000 * (LOAD_S + MEDIAN_ROUND_S)
    assert load.value == pytest.approx(load_ms) and load.met
    assert load.extra["low95"] <= load_ms <= load.extra["high95"]
    assert load.extra["after_the_former_guests_end"] == pytest.approx(load_ms)
    leak = by_id["leak_recovered"]
    assert leak.value == pytest.approx(1 - REMAINING_KIB / LEAKED_KIB, abs=1e-3) and not leak.met
    assert leak.extra["micro_cold"] == 1.0, "less than before the leak is all of it"
    assert any("phase_restore_ms_micro" in line for line in findings.absent)


def test_missing_rows_are_reported(tmp_path):
    """A file without rows has no figures, and names each."""
    findings = analysis.figures(write(tmp_path / "r.csv", []), "r.csv")
    assert not findings.figures
    for name in ("kexec_vs_cold", "phase_late_vs_cold", "phase_restore_ms", "leak_recovered"):
        assert any(name in line for line in findings.absent)


def test_stages_add_up_to_the_downtime(tmp_path):
    """Stages that cannot be separated are one column, so that the sum is complete."""
    frame = write(tmp_path / "r.csv", invented_rows())
    for line in analysis.stages(frame):
        whole = [
            row for row in analysis.downtimes(frame) if (row["guest"], row["reboot"]) == (line["guest"], line["reboot"])
        ]
        parts = sum(value for key, value in line.items() if isinstance(value, float) and key != "n")
        assert parts == pytest.approx(whole[0]["downtime"], rel=1e-3)
    kexec = next(line for line in analysis.stages(frame) if line["reboot"] == "kexec")
    assert (
        kexec[analysis.JUMP] == pytest.approx(SHUT_S + KEXEC_LOADER_S + MEDIAN_ROUND_S, rel=1e-3)
        and kexec["firmware"] is None
    )
    peers = {line["how"]: line for line in analysis.peers(frame)}
    assert peers["qboot"]["first answer"] == pytest.approx(1.0) and peers["qboot"]["running"] is None


def test_a_raw_file_is_analysed_and_drawn_again(tmp_path):
    """By the command line, as a user does."""
    write(tmp_path / "os-raw.csv", invented_rows())
    result = CliRunner().invoke(app, ["os", "--from-raw", str(tmp_path / "os-raw.csv"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "os.json").read_text())
    assert document["figures"]["phase_restore_ms"]["value"] == pytest.approx(1000 * (LOAD_S + MEDIAN_ROUND_S))
    for plot in document["plots"]:
        assert (tmp_path / plot).stat().st_size > 1000
    assert "shut down and jump" in (tmp_path / "os.md").read_text()
