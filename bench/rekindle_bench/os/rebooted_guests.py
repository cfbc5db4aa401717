"""Guests of the OS-reboot benchmark, each rebooted while a client requests a page from it all the time.

`OsEnvironment.reboot` makes one reboot and returns its row.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_bench.environment import Environment, Setup
from rekindle_lab.guests import Image
from rekindle_lab.os_guest import OsGuest, ask_often, wait_saved
from rekindle_lab.page_client import Gap, PageClient, longest_gap
from rekindle_lab.qmp import Qmp, QmpError
from rekindle_lab.rekindle import Rekindle, RekindleError

from .boot import Firmware, kernel_began, user_space_after_us
from .rows import FROZEN, Row

IMAGE = "micro"
SAMPLE_S = 1.0
"""Seconds between two samples of a guest that does not answer."""
CONSOLE_CHARACTERS = 600
"""Length of the end of a console log in an error."""
SETTLE_S = 1.0
"""Seconds for which a client uses an undisturbed guest before and after a reboot."""


@dataclass
class OsEnvironment(Environment):
    """The environment of the OS-reboot benchmark."""

    def os_guest(
        self, kind: str, index: int, memory_mib: int, image: Image | None = None, *, phases: bool = False
    ) -> OsGuest:
        """Returns a guest. A guest that keeps phases has no debug port, so the time of its firmware is not measured."""
        self.need(memory_mib=int(memory_mib * 1.1) + 256, disk_mib=2048)
        name = f"{kind}{index}"
        return OsGuest(
            name,
            image=image or self.image(kind),
            memory_mib=memory_mib,
            index=index,
            touch=None,
            netns=self.netns,
            ram_dir=self.ram_dir,
            disk_dir=self.disk_dir,
            kind=kind,
            phases=phases,
            firmware=None if phases else self.work / f"{name}.firmware",
        )

    def record_loss(self, guest: OsGuest, what: str) -> None:
        """Records a reboot that left the guest unusable, and boots the guest."""
        self.errors.append(what)
        self.log(what)
        self.rekindle.call("reboot", guest.name, "--how", "cold")
        guest.wait_ready()
        if guest.phases:
            self.wait_saved(guest)

    def wait_saved(self, guest: OsGuest) -> None:
        """Waits until each phase has a usable candidate."""
        wait_saved(self.rekindle, guest)

    def reboot(self, guest: OsGuest, how: str, round_number: int, case: str = "reboot") -> Row:
        """Reboots a guest in one way with a client at it. Returns the row once the guest answers again."""
        words = ["--how", how]
        if phase := phase_of(how):
            words = ["--how", "phase", "--candidate", phase]
        if how.endswith(FROZEN):
            words += ["--end", "freeze"]
        row = Row(case=case, guest=guest.kind, memory_mib=guest.memory_mib, how=how, round=round_number)
        boots_from_start = how in ("cold", "warm-cache")
        ask_often(guest.netns)
        with PageClient(guest.netns, guest.address, guest.path) as client, ExitStack() as stack:
            client.wait(10)
            time.sleep(SETTLE_S)
            firmware = stack.enter_context(Firmware(guest.firmware)) if boots_from_start and guest.firmware else None
            began_us, began = time.time_ns() // 1000, time.monotonic()
            result = self.rekindle.call("reboot", guest.name, *words)
            row.command_us = int((time.monotonic() - began) * 1e6)
            try:
                client.wait(10, after_host_us=max(began_us, result["resume_host_us"]))
            except RekindleError as error:
                raise RekindleError(f"{error}; {describe_hang(self.rekindle, guest)}") from error
            guest.wait_ready()
            client.wait(10)
            time.sleep(SETTLE_S)
        fill(row, result, longest_gap(client.answers, began_us))
        if firmware is not None:
            row.loader_host_us = firmware.host_us
        if boots_from_start or how == "kexec":
            row.kernel_host_us = kernel_began(guest).host_us
            if guest.kind != "micro":
                timestamp = guest.ssh("systemctl show -p UserspaceTimestampMonotonic")
                row.user_host_us = row.kernel_host_us + user_space_after_us(timestamp)
        return row


def describe_hang(rekindle: Rekindle, guest: OsGuest) -> str:
    """Describes a guest that does not answer: two samples of its processor, and the end of its console log."""
    folder = rekindle.run_dir / guest.name
    try:
        text = (folder / "console.log").read_text(errors="replace")
        vmm = Path(json.loads((folder / "state.json").read_text())["vmm"]["directory"])
        with Qmp(vmm / "watch.sock", timeout=10.0) as qmp:
            status = qmp.execute("query-status")["status"]
            symptoms = [str(status)]
            for _ in range(2):
                registers = qmp.execute("human-monitor-command", {"command-line": "info registers"})
                words = [word for word in registers.split() if word.startswith(("RIP=", "RFL=", "HLT="))]
                symptoms.append(" ".join(words))
                time.sleep(SAMPLE_S)
    except (OSError, QmpError, ValueError, KeyError, TypeError) as error:
        return f"its QEMU cannot be queried: {error}"
    return f"QEMU: {'; '.join(symptoms)}; its console ends: {text[-CONSOLE_CHARACTERS:]!r}"


def phase_of(how: str) -> str:
    """Returns the phase from which a way resumes; empty for other ways."""
    return how.removeprefix("phase-").removesuffix(FROZEN) if how.startswith("phase-") else ""


def fill(row: Row, result: dict[str, Any], gap: Gap) -> None:
    """Fills a row from the outputs of the command and the client."""
    row.silent_host_us, row.served_host_us = gap.start_host_us, gap.end_host_us
    row.gap_us, row.first_us = gap.us, gap.first_us
    row.steps = result.get("steps", [])
    if row.how != "kexec":
        row.ended_host_us, row.running_host_us = result["stop_host_us"], result["resume_host_us"]
    row.ended = result.get("ended") or ""
    phase = result.get("phase") or {}
    row.candidate, row.load_us = phase.get("candidate") or "", phase.get("load_us")
    if row.candidate != phase_of(row.how):
        skipped = phase.get("skipped")
        raise RekindleError(f"{result.get('name')}: it resumed from {row.candidate or 'nothing'}: {skipped}")


@contextmanager
def environment(setup: Setup) -> Iterator[OsEnvironment]:
    """Sets up the environment: folders, a tmpfs for guest RAM, a network namespace."""
    with setup.workspace() as space:
        yield setup.environment(OsEnvironment, space)
