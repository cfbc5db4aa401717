"""QEMU's own `cpr-transfer` (QEMU 10 and later), which replaces a QEMU under its guest: the peer of a warm VMM reboot.

A peer is another way to do what Rekindle does, which it is compared with. `CprVm` is a guest of the peer, and
`CprVm.reboot` the measured operation. The source is the QEMU that the guest leaves, the destination the new one; state
goes over two channels: open descriptors over the cpr channel, everything else over the main one.

The peer is set up as QEMU's documentation describes (docs/devel/migration/CPR.rst, example 2), with the hardware of the
Rekindle VM that it is compared with, and with every known advantage:

- RAM is a shared file on the same tmpfs as Rekindle's. `aux-ram-share=on` keeps the small blocks in place, too. So no
  RAM is copied.
- Both channels are unix sockets, and no capability is set.
- The destination QEMU is started, connected to and ready *before* the source stops the guest: `-incoming defer`, then
  `migrate-incoming` triggers the stop. (Measured: as fast as giving the channel on the command line, and the
  destination's RESUME event is always seen.)
- `suppress-vmdesc=on`: without it the guest is stopped for 1 ms longer.
- The tap is handed to both QEMUs as a descriptor, as a user of `cpr-transfer` has to do it in QEMU 10.

Guest-stopped time runs from the source's STOP event to the destination's RESUME event, by the host clock, as for
Rekindle.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle_lab.netns import Tap
from rekindle_lab.qmp import Qmp, QmpError

START_DEADLINE_S = 60.0
"""Deadline for the start of a QEMU."""


RETRY_S = 0.002
"""Seconds between two attempts to hand the descriptors over. They are part of no measured time: the guest runs."""


class PeerError(Exception):
    """The peer did not start or did not hand its guest over. The text has QEMU's log."""


@dataclass(frozen=True)
class Handover:
    """One replacement of a QEMU by cpr-transfer. Times of the host clock are microseconds since 1970."""

    command_host_us: int
    """When the destination QEMU was started."""
    stop_host_us: int
    """When the source stopped the guest."""
    resume_host_us: int
    """When the destination resumed it."""
    downtime_ms: int | None
    """Total time as reported by QEMU itself."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Steps as in the JSON of a reboot: phase, step, start_host_us, us."""

    @property
    def stopped_us(self) -> int:
        """Guest-stopped time in microseconds."""
        return self.resume_host_us - self.stop_host_us


def host_us() -> int:
    """Returns the host clock, microseconds since 1970."""
    return time.time_ns() // 1000


def arguments(
    command_line: Sequence[str],
    *,
    paths: dict[str, str],
    tap_fds: dict[int, int],
    incoming: Path | None,
) -> list[str]:
    """Returns the peer's command line, from that of the equivalent Rekindle VM's first QEMU.

    Replaces each path that is a key of `paths`, also as a prefix, and the descriptor numbers of taps in `tap_fds`.
    Removes only what serves Rekindle's own hand-over, and adds what `cpr-transfer` requires. `incoming`: the cpr
    channel's socket for a destination QEMU; `None` for the QEMU that boots the guest.
    """
    words = list(command_line)
    if words and not words[0].startswith("-"):
        words.pop(0)  # the binary
    result = []
    for option, value in _options(words):
        if option in ("-S", "-incoming") or (option == "-global" and value == "migration.send-configuration=off"):
            continue
        if option == "-machine" and value is not None:
            value += ",aux-ram-share=on"
        if option == "-netdev" and value is not None:
            value = re.sub(r"\bfd=(\d+)", lambda match: f"fd={tap_fds[int(match[1])]}", value)
        if value is not None:
            value = _replace_paths(value, paths)
        result += [option] if value is None else [option, value]
    if incoming is not None:
        result += ["-incoming", "defer", "-incoming", json.dumps(_channel("cpr", incoming))]
    return result


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Splits a command line into options, each with its value if it has one."""
    index = 0
    while index < len(words):
        has_value = index + 1 < len(words) and not words[index + 1].startswith("-")
        yield words[index], words[index + 1] if has_value else None
        index += 2 if has_value else 1


def _replace_paths(text: str, paths: dict[str, str]) -> str:
    if not paths:
        return text
    longest_first = sorted(paths, key=len, reverse=True)  # one path can be the start of another
    return re.sub("|".join(map(re.escape, longest_first)), lambda match: paths[match[0]], text)


def _channel(kind: str, path: Path) -> dict[str, Any]:
    return {"channel-type": kind, "addr": {"transport": "socket", "type": "unix", "path": str(path)}}


def _step(phase: str, step: str, begin_us: int, end_us: int) -> dict[str, Any]:
    return {"phase": phase, "step": step, "start_host_us": begin_us, "us": end_us - begin_us}


class CprVm:
    """A guest that was started for `cpr-transfer`, with the hardware of a Rekindle VM."""

    def __init__(
        self,
        binary: str,
        command_line: Sequence[str],
        folder: Path,
        *,
        paths: dict[str, str],
        vmm_directory: str,
        taps: dict[int, Tap],
    ) -> None:
        """Starts the guest.

        `command_line` and `vmm_directory` are those of the equivalent Rekindle VM's first QEMU. `paths` maps the VM's
        RAM file, console log and disks to files of the peer. `taps` has a tap for each descriptor in the command line.
        `folder` is made, and holds sockets and logs.
        """
        self._binary = binary
        self._command_line = list(command_line)
        self._folder = folder
        self._paths = paths
        self._vmm_directory = vmm_directory
        self._taps = taps
        self._generation = 0
        """Number of replacements; each QEMU has a folder of its own."""
        folder.mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None
        """The QEMU that has the guest."""
        self._next: subprocess.Popen[bytes] | None = None
        """The destination, during a replacement."""
        try:
            self._process = self._spawn(incoming=None)
            self._qmp = self._connect(self._process)
        except BaseException:
            self.stop()
            raise

    @property
    def _directory(self) -> Path:
        return self._folder / str(self._generation)

    def _spawn(self, incoming: Path | None) -> subprocess.Popen[bytes]:
        """Starts a QEMU; `incoming`: the cpr channel's socket of a destination."""
        self._directory.mkdir()
        destination_arguments = arguments(
            self._command_line,
            paths={**self._paths, self._vmm_directory: str(self._directory)},
            tap_fds={number: tap.fd for number, tap in self._taps.items()},
            incoming=incoming,
        )
        with (self._directory / "qemu.log").open("wb") as log:
            return subprocess.Popen(
                [self._binary, *destination_arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[tap.fd for tap in self._taps.values()],
                start_new_session=True,
            )

    def _connect(self, process: subprocess.Popen[bytes]) -> Qmp:
        try:
            return Qmp(self._directory / "qmp.sock", START_DEADLINE_S, alive=lambda: process.poll() is None)
        except QmpError as error:
            raise PeerError(f"{self._binary}: {error}; its log: {self._log()}") from error

    def _log(self) -> str:
        try:
            return (self._directory / "qemu.log").read_text(errors="replace").strip() or "(nothing)"
        except OSError:
            return "(nothing)"

    def reboot(self) -> Handover:
        """Replaces the QEMU, with the commands of QEMU's document. After a failure the peer should be stopped."""
        if self._process is None:
            raise PeerError("the peer is not running")
        source, source_qmp = self._process, self._qmp
        started_us = host_us()
        self._generation += 1
        main_socket, cpr_socket = self._directory / "main.sock", self._directory / "cpr.sock"
        main_channel = _channel("main", main_socket)
        source_qmp.execute("migrate-set-parameters", {"mode": "cpr-transfer"})
        source_qmp.forget_events()
        self._next = self._spawn(incoming=cpr_socket)
        self._hand_descriptors(source_qmp, [main_channel, _channel("cpr", cpr_socket)], cpr_socket)
        destination_qmp = self._connect(self._next)
        triggered_us = host_us()
        destination_qmp.execute("migrate-incoming", {"channels": [main_channel]})
        try:
            resumed_us = destination_qmp.wait_event("RESUME").host_us
            stopped_us = source_qmp.wait_event("STOP").host_us
        except QmpError as error:
            raise PeerError(f"cpr-transfer: {error}; the new QEMU's log: {self._log()}") from error
        downtime_ms = source_qmp.execute("query-migrate").get("downtime")
        settle_us = host_us()
        source_qmp.close()
        source.kill()
        source.wait()
        self._process, self._qmp, self._next = self._next, destination_qmp, None
        return Handover(
            command_host_us=started_us,
            stop_host_us=stopped_us,
            resume_host_us=resumed_us,
            downtime_ms=downtime_ms,
            steps=[
                _step("prepare", "start", started_us, triggered_us),
                _step("prepare", "trigger", triggered_us, stopped_us),
                _step("suspend", "hand-over", stopped_us, resumed_us),
                _step("settle", "end-old", settle_us, host_us()),
            ],
        )

    def _hand_descriptors(self, source_qmp: Qmp, channels: list[dict[str, Any]], cpr_socket: Path) -> None:
        """Issues `migrate`, repeatedly until the destination listens: its socket file exists a little earlier."""
        deadline = time.monotonic() + START_DEADLINE_S
        assert self._next is not None
        while True:
            try:
                if cpr_socket.exists():
                    source_qmp.execute("migrate", {"channels": channels})
                    return
            except QmpError as error:
                if "Failed to connect" not in str(error):
                    raise PeerError(f"cpr-transfer: {error}") from error
            if self._next.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"the new QEMU does not listen at {cpr_socket}; its log: {self._log()}")
            time.sleep(RETRY_S)

    def stop(self) -> None:
        """Ends the QEMUs and removes their files. The taps stay open: they belong to the caller."""
        for process in (self._next, self._process):
            if process is not None:
                process.kill()
                process.wait()
        self._next = self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._paths.values():
            if os.path.lexists(path) and not Path(path).is_dir():
                Path(path).unlink()


def reboot_all(peers: Sequence[CprVm]) -> list[Handover]:
    """Replaces the QEMUs of several guests at the same time."""
    if len(peers) == 1:
        return [peers[0].reboot()]
    with ThreadPoolExecutor(len(peers)) as pool:
        return [future.result() for future in [pool.submit(peer.reboot) for peer in peers]]
