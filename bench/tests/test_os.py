"""Topic `os`: figures, tables and plots from invented rows; stages of a boot, definitions of guests, lost guests.

Ways to reboot a guest's OS: `cold`; `kexec` (the kernel starts the next one, without firmware and boot loader); by a
*phase*, a snapshot that the guest has saved at a point of an earlier boot, here of `services` (late in the boot).
With `-frozen` the guest is not shut down first. `qboot` is a peer: a fast firmware.
"""

import http.server
import itertools
import json
import os
import random
import socket
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import typer
from made_rows import write_rows
from typer.testing import CliRunner

from made_up import START_US
from rekindle_bench.__main__ import main
from rekindle_bench.os import analysis, boot, cases, rows
from rekindle_bench.os.plan import FULL, GUESTS, QUICK, left_out, quick
from rekindle_bench.os.rebooted_guests import OsEnvironment, describe_hang, fill, phase_of
from rekindle_bench.os.rows import PEERS, WAYS, Row
from rekindle_lab import page_client
from rekindle_lab.guests import Image
from rekindle_lab.os_guest import OsGuest, make_disk
from rekindle_lab.page_client import Answer, PageClient, longest_gap
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.runs.workspace import Workspace

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


def made_up():
    made = []
    for number in range(ROUNDS):
        made += [booted("debian", "cold", number), booted("debian", "kexec", number)]
        made += [booted("immutable", "cold", number), restored("immutable", "phase-services", number)]
        made.append(restored("immutable", "phase-services-frozen", number, shut_s=FROZEN_SHUT_S))
        made.append(leaked("micro", "cold", number, remaining_kib=-100))
        made.append(leaked("immutable", "phase-services", number, REMAINING_KIB))
        made += [restored("micro", "phase-services", number, case="peers"), by_qboot(number)]
    return made


def test_known_rows_give_known_figures(tmp_path):
    findings = analysis.figures(write(tmp_path / "r.csv", made_up()), "r.csv")
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
    frame = write(tmp_path / "r.csv", made_up())
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
    write(tmp_path / "os-raw.csv", made_up())
    result = CliRunner().invoke(app, ["os", "--from-raw", str(tmp_path / "os-raw.csv"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "os.json").read_text())
    assert document["figures"]["phase_restore_ms"]["value"] == pytest.approx(1000 * (LOAD_S + MEDIAN_ROUND_S))
    for plot in document["plots"]:
        assert (tmp_path / plot).stat().st_size > 1000
    assert "shut down and jump" in (tmp_path / "os.md").read_text()


def test_the_longest_gap_around_a_reboot():
    """Answers end at 0.1, 5.0, 5.1 and 9.0 ms; the reboot began at 5.05 ms."""
    answers = [Answer(at, 7) for at in (0, 100, 5_000, 5_100)] + [Answer(9_000, 33)]
    random.Random(1).shuffle(answers)
    gap = longest_gap(answers, 5_050)
    assert (gap.start_host_us, gap.end_host_us, gap.us, gap.first_us) == (5_100, 9_000, 3_900, 33)
    assert longest_gap(answers, 0).us == 4_900, "one that began before it counts"
    with pytest.raises(RekindleError):
        longest_gap(answers, 10_000)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "5000")
        self.end_headers()
        self.wfile.write(b"x" * (5000 if self.path == "/whole" else 100))

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("path", "status", "answered"), [("/whole", 200, True), ("/half", 200, False), ("/whole", 503, False)]
)
def test_only_a_whole_answer_counts(monkeypatch, path, status, answered):
    """A page that ends early, or an error, is no answer."""
    monkeypatch.setattr(page_client, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(page_client.netns, "inside", lambda _, function: function())
    monkeypatch.setattr(Handler, "status", status)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        asks = PageClient("none", "127.0.0.1", path, port)
        if answered:
            with asks:
                asks.wait(5)
        else:
            assert not asks.ask_once()
        assert bool(asks.answers) == answered
    finally:
        server.shutdown()


def test_the_kernels_clock_and_systemds():
    """The error of a start is half the time of a request, here less than a second."""

    class Guest:
        replies = iter(["ok 12.500", "ok 12.501"])

        def command(self, line):
            assert line == "uptime"
            return next(self.replies, "ok 12.502")

    began = boot.kernel_began(Guest())
    assert 0 <= began.within_us < 1_000_000
    assert boot.user_space_after_us("UserspaceTimestampMonotonic=2345678\n") == 2_345_678
    with pytest.raises(ValueError, match="UserspaceTimestampMonotonic"):
        boot.user_space_after_us("Unknown property")


def test_only_new_output_of_the_firmware_counts(tmp_path):
    """The file of the previous QEMU has the same words."""
    path = tmp_path / "firmware"
    path.write_text("Booting from ROM...\n")
    with boot.Firmware(path) as firmware:
        assert not path.exists()
    assert firmware.host_us is None
    with boot.Firmware(path) as firmware:
        path.write_text("SeaBIOS (version 1)\nBooting from ROM...\n")
        firmware._thread.join(10)
    assert firmware.host_us is not None


def guest(tmp_path, kind, **more):
    folder = tmp_path / "image"
    folder.mkdir(exist_ok=True)
    return OsGuest(
        "g",
        image=Image(kind, folder),
        memory_mib=512,
        index=3,
        touch=None,
        netns="ns",
        ram_dir=tmp_path,
        disk_dir=tmp_path,
        kind=kind,
        **more,
    )


def test_definitions_have_what_each_way_needs(tmp_path):
    """A guest that saves phases has no debug port; `immutable` has a read-only root and a data disk."""
    plain = guest(tmp_path, "debian", firmware=tmp_path / "f").definition("qemu")
    assert "isa-debugcon" in plain and "[phase]" not in plain and "root=/dev/vda1 rw" in plain
    keeps = guest(tmp_path, "immutable", phases=True).definition("qemu")
    assert '[phase]\nsave = ["kernel", "services"]' in keeps and "isa-debugcon" not in keeps
    assert keeps.count("server = true") == 2 and keeps.count("readonly = true") == 1
    assert 'save = ["kernel"]' in guest(tmp_path, "debian", phases=True).definition("qemu")


def test_a_root_in_a_partition(tmp_path):
    """The partition starts at sector 2048 (1 MiB) and has 6144 sectors (3 MiB), as the image."""
    debian = guest(tmp_path, "debian")
    source = debian.image.folder / "disk.raw"
    source.write_bytes(os.urandom(3 << 20))
    make_disk("debian", debian.image, debian.own_disk)
    disk = debian.own_disk.read_bytes()
    assert disk[1 << 20 :] == source.read_bytes() and disk[510:512] == b"\x55\xaa"
    assert int.from_bytes(disk[454:458], "little") == 2048 and int.from_bytes(disk[458:462], "little") == 6144


def test_a_reboot_that_did_not_resume_from_its_phase_is_rejected():
    """Otherwise a cold boot would be measured as a phase. With kexec no QEMU ends."""
    gap = page_client.Gap(START_US, START_US + 1000, 10)
    result = {"name": "g", "stop_host_us": 1, "resume_host_us": 2, "phase": {"candidate": None, "skipped": ["why"]}}
    with pytest.raises(RekindleError, match="why"):
        fill(Row(case="reboot", guest="micro", memory_mib=512, how="phase-services", round=0), result, gap)
    row = Row(case="reboot", guest="debian", memory_mib=512, how="kexec", round=0)
    fill(row, {"stop_host_us": 1, "resume_host_us": 2, "steps": []}, gap)
    assert row.ended_host_us is None and row.gap_us == 1000


def test_plans():
    """The full plan has at least 10 rounds of each guest."""
    assert not left_out(FULL)
    assert any("debian: reboots of each way: 0 of" in line for line in left_out(QUICK))
    assert all(number >= 10 for number in FULL.rounds.values())
    assert set(GUESTS["immutable"]) == set(WAYS) and not set(WAYS) & set(PEERS)


def test_a_case_that_is_named_is_in_the_quick_plan():
    """Counts of 0 become 1; larger ones stay."""
    assert quick([]) == QUICK
    named = quick(["debian", "leak"])
    assert named.rounds == {"micro": 2, "debian": 1, "immutable": 1}
    assert named.leaks == {"micro": 1, "immutable": 1} and named.peers == QUICK.peers
    assert quick(["peers"]).peers == {"micro": 2, "immutable": 1}


def test_the_phase_of_a_way():
    """The suffix `-frozen` is no part of the phase's name."""
    assert phase_of("phase-services") == phase_of("phase-services-frozen") == "services"
    assert phase_of("phase-kernel") == "kernel" and phase_of("cold") == ""


def test_a_guest_that_does_not_answer_is_described(tmp_path):
    """QEMU's monitor is a socket that gives invented answers."""
    guest, folder = SimpleNamespace(name="mute"), tmp_path / "mute"
    rekindle = SimpleNamespace(run_dir=tmp_path)
    assert "cannot be queried" in describe_hang(rekindle, guest)
    (folder / "vmm-1").mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"vmm": {"directory": str(folder / "vmm-1")}}))
    (folder / "console.log").write_text("last line")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "vmm-1" / "watch.sock"))
    listener.listen()

    def serve():
        connection, _ = listener.accept()
        with connection, connection.makefile("rw") as lines:
            answers = [{}, {"status": "running"}, "EAX=1 RIP=ab RFL=2\nHLT=1", "RIP=cd"]
            for reply in [{"QMP": {}}, *({"return": answer} for answer in answers)]:
                lines.write(json.dumps(reply) + "\n")
                lines.flush()
                lines.readline()

    thread = threading.Thread(target=serve)
    thread.start()
    seen = describe_hang(rekindle, guest)
    thread.join()
    listener.close()
    for word in ("running", "RIP=ab RFL=2 HLT=1", "RIP=cd", "last line"):
        assert word in seen, seen


def test_a_guest_that_is_lost_is_booted(tmp_path):
    """The next reboot needs a working guest."""
    calls = []
    rekindle = SimpleNamespace(call=lambda *words: calls.append(words))
    guest = SimpleNamespace(name="mute", phases=False, wait_ready=lambda: calls.append("ready"))
    env = OsEnvironment(
        root=tmp_path,
        rekindle=rekindle,
        qemu="qemu",
        rows=None,
        space=Workspace(binary=tmp_path, work=tmp_path, disk=tmp_path, namespaces=("ns",)),
    )
    env.record_loss(guest, "it did not return")
    assert calls == [("reboot", "os", "mute", "--how", "cold"), "ready"]
    assert env.errors == ["it did not return"]


def test_a_loss_skips_a_row_and_too_many_end_the_case(tmp_path):
    """Each tolerated loss costs one row; one more ends the case, which then has no row at all."""

    def case(failing):
        """Returns rows and losses of a case whose first `failing` reboots fail."""
        rows, losses, tries = [], [], itertools.count()

        def reboot(*_):
            if next(tries) < failing:
                raise RekindleError("it did not return")
            return Row(case="reboot", guest="micro", memory_mib=512, how="cold", round=0)

        env = SimpleNamespace(
            os_guest=lambda *_, **__: guest(tmp_path, "micro"),
            ours=nullcontext,
            wait_saved=lambda _: None,
            reboot=reboot,
            record_loss=lambda _, what: losses.append(what),
            rows=rows,
            log=lambda _: None,
        )
        try:
            cases.CASES["micro"](env, FULL)
        except RekindleError:
            return len(rows), len(losses), "stopped"
        return len(rows), len(losses), "whole"

    all_reboots = FULL.rounds["micro"] * len(GUESTS["micro"])
    assert case(cases.TOLERATED_LOSSES) == (all_reboots - cases.TOLERATED_LOSSES, cases.TOLERATED_LOSSES, "whole")
    assert case(cases.TOLERATED_LOSSES + 1) == (0, cases.TOLERATED_LOSSES, "stopped")
