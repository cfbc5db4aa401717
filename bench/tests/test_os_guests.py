"""Topic `os`: definitions of guests, and reboots after which a guest does not answer or has not resumed as required.

A *phase* is a snapshot that the guest has saved at a point of an earlier boot. No guest is started.
"""

import itertools
import json
import os
import socket
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from invented_record import START_US
from rekindle_bench.os import cases
from rekindle_bench.os.plan import FULL, GUESTS
from rekindle_bench.os.rebooted_guests import OsEnvironment, describe_hang, fill, phase_of
from rekindle_bench.os.rows import Row
from rekindle_lab import page_client
from rekindle_lab.guests import Image
from rekindle_lab.os_guest import OsGuest, make_disk
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.runs.workspace import Workspace


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
    assert calls == [("reboot", "mute", "--how", "cold"), "ready"]
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
