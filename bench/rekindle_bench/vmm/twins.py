"""VMs of the VMM-reboot benchmark, their twins for the peer, and reboots with a client at each.

The peer is QEMU's own way to replace itself under a guest, *cpr-transfer*. It cannot run on Rekindle's VM, so for it a
*twin* is started: a guest with the same QEMU command line but its own RAM file, disk, tap and network namespace.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rekindle_bench.environment import Environment, Setup
from rekindle_bench.rows import write_sidecar
from rekindle_lab import guests, netns
from rekindle_lab.guests import Guest
from rekindle_lab.peers.cpr import CprVm, reboot_all
from rekindle_lab.rekindle import MARGIN_S, RekindleError, failed_requests, gap_around

from .rows import Row

RECORDS = "vmm-breakdown.json"
"""File of the client's throughput during single reboots, for figure 8."""


@dataclass(frozen=True)
class Client:
    """Settings of the client (`rekindle probe`) that sends requests to a guest while the guest is rebooted."""

    path: str | None = None
    """Path of a file of nginx; `None`: the guest's usual service."""
    every: str = "1ms"
    """Interval between two requests."""
    options: tuple[str, ...] = ()
    margin_s: float = MARGIN_S
    """Duration of the measurement before the reboot and after it."""

    def url(self, guest: Guest) -> str:
        """Returns the requested URL."""
        if self.path is None:
            return guest.service_url
        # In a trial micro replaces debian; it has no files.
        path = "bytes/24576" if guest.image.kind == "micro" else self.path
        return f"http://{guest.address}/{path}"


USUAL = Client()
LOAD = Client(path="files/020.bin", every="4ms", options=("--connections", "8", "--interval", "20ms"), margin_s=2.0)
"""2000 requests per second for a file of 24 KiB if the guest keeps up."""


@dataclass
class VmmEnvironment(Environment):
    """The environment of the VMM-reboot benchmark: VMs whose QEMU is replaced, and their twins for the peer."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """Reboots with the client's throughput, for figure 8."""

    @property
    def peer_netns(self) -> str:
        """Network namespace of the peer's guests."""
        return self.space.namespaces[1]

    @contextmanager
    def peer(self, guest: Guest, *, wait: bool = True) -> Iterator["Peer"]:
        """Starts a guest for cpr-transfer with the hardware of `guest`, which must not have been rebooted yet.

        The twin is ready unless `wait` is false.
        """
        shown = self.rekindle.show(guest.name)
        twin = replace(guest, name=f"{guest.name}-peer", netns=self.peer_netns)
        folder = self.work / twin.name
        command_line = shown["command_line"]
        text = "\n".join(command_line)
        # The twin's own files, by the path of Rekindle's file.
        paths = {path: str(folder / "console.log") for path in re.findall(r"logfile=([^,\n]+)", text)}
        paths |= {path: str(self.ram_dir / f"{twin.name}.ram") for path in re.findall(r"mem-path=([^,\n]+)", text)}
        if guest.disk and twin.disk:
            guests.copy_sparse(twin.image.folder / "disk.raw", twin.disk)
            paths[str(guest.disk)] = str(twin.disk)
        descriptors = [int(descriptor) for descriptor in re.findall(r"\bfd=(\d+)", text)]
        with ExitStack() as stack:
            taps: dict[int, netns.Tap] = {}
            for descriptor in descriptors:
                tap = netns.Tap(f"rkp{os.getpid() % 100000}x{guest.index}", twin.netns, twin.host_address)
                stack.callback(tap.close)
                taps[descriptor] = tap
            vm = CprVm(self.qemu, command_line, folder, paths=paths, vmm_directory=shown["vmm"]["directory"], taps=taps)
            stack.callback(vm.stop)
            if wait:
                twin.wait_ready()
            yield Peer(twin, vm)

    def reboot(
        self,
        case: str,
        round_number: int,
        targets: Sequence["Guest | Peer"],
        how: str,
        *options: str,
        client: Client = USUAL,
    ) -> dict[str, Any]:
        """Reboots guests together with a client at each, appends a row for each, and returns the first guest's record.

        All of `targets` are guests of Rekindle, or all are peers (then `how` is cpr-transfer).
        """
        peers = [target for target in targets if isinstance(target, Peer)]
        vms = [target.guest if isinstance(target, Peer) else target for target in targets]
        urls = [(client.url(guest), guest.netns) for guest in vms]
        # The timeout is longer than any stop. A boot kills the old connection, so a cold reboot needs a short timeout.
        settings = (*client.options, "--timeout", "5s" if how == "cold" else "300s")
        with self.rekindle.probes(urls, *settings, every=client.every, margin_s=client.margin_s) as probes:
            started = time.monotonic()
            if peers:
                document = handover_json(peers)
            else:
                document = self.rekindle.reboot([guest.name for guest in vms], how, *options)
            command_us = int((time.monotonic() - started) * 1e6)
            for guest in vms:
                guest.wait_ready()
        for guest, vm, probe in zip(vms, by_name(document, [guest.name for guest in vms]), probes, strict=True):
            row = Row(
                case=case,
                guest=guest.image.kind,
                memory_mib=guest.memory_mib,
                vms=len(vms),
                how=how,
                round=round_number,
                vm=guest.name,
                total_us=document.get("first_stop_to_last_resume_us"),
                command_us=command_us,
            )
            _fill_from_command(row, vm)
            _fill_from_client(row, probe.report)
            self.rows.append(row)
        return {"how": how, "reboot": document, "probe": probes[0].report}


def _fill_from_command(row: Row, vm: dict[str, Any]) -> None:
    """Fills a row from the JSON that the command has printed on its VM."""
    row.stopped_us = vm.get("stopped_us")
    row.stop_host_us, row.resume_host_us = vm.get("stop_host_us"), vm.get("resume_host_us")
    row.memory_changed_bytes = vm.get("memory_changed_bytes")
    row.from_version, row.to_version = version(vm.get("from")), version(vm.get("to"))
    row.steps = vm.get("steps", [])


def _fill_from_client(row: Row, report: dict[str, Any]) -> None:
    """Fills a row from the report of the client that used its guest."""
    gap = gap_around(report, row.stop_host_us, row.resume_host_us)
    row.gap_us = gap.length_us
    row.gap_start_host_us, row.gap_end_host_us = gap.start_host_us or None, gap.end_host_us or None
    row.answered, row.failed = report["answered"], failed_requests(report)
    row.connections_lost = report["connections_lost"]


@dataclass(frozen=True)
class Peer:
    """A guest that is rebooted by cpr-transfer."""

    guest: Guest
    vm: CprVm


def version(vmm: dict[str, Any] | None) -> str:
    """Returns the QEMU version in `from` or `to` of a reboot's JSON, as text."""
    given = (vmm or {}).get("version", "")
    return ".".join(str(part) for part in given.values()) if isinstance(given, dict) else str(given)


def by_name(document: dict[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the VMs of a reboot's JSON in the order of `names`. Raises unless each was rebooted."""
    vms = {vm["name"]: vm for vm in document["vms"]}
    for name in names:
        outcome = vms.get(name, {}).get("outcome", "not in the report")
        if outcome != "done":
            raise RekindleError(f"reboot of {name}: {outcome}")
    return [vms[name] for name in names]


def handover_json(peers: Sequence[Peer]) -> dict[str, Any]:
    """Reboots peers, and returns the result in the form of a reboot's JSON."""
    handovers = reboot_all([peer.vm for peer in peers])
    vms = [
        {
            "name": peer.guest.name,
            "outcome": "done",
            "stopped_us": handover.stopped_us,
            "stop_host_us": handover.stop_host_us,
            "resume_host_us": handover.resume_host_us,
            "steps": handover.steps,
        }
        for peer, handover in zip(peers, handovers, strict=True)
    ]
    first = min(handover.stop_host_us for handover in handovers)
    last = max(handover.resume_host_us for handover in handovers)
    return {"how": "cpr-transfer", "vms": vms, "first_stop_to_last_resume_us": last - first}


@contextmanager
def environment(setup: Setup) -> Iterator[VmmEnvironment]:
    """Sets up the environment: folders, a tmpfs for guest RAM, and a network namespace each for Rekindle and the peer.

    At the end it writes the records of the client's throughput next to the rows.
    """
    with setup.workspace(namespaces=("", "p")) as space:
        env = setup.environment(VmmEnvironment, space)
        try:
            yield env
        finally:
            write_sidecar(setup.rows.path, RECORDS, env.records)
