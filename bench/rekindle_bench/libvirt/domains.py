"""The environment of the libvirt benchmark: domains of a private libvirt, and their replacements as clients see them.

A *domain* is a guest that libvirt has started. Nothing about it is prepared for Rekindle: its RAM is private memory of
its QEMU, as libvirt starts QEMU by default.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rekindle_bench.environment import Environment, Setup
from rekindle_bench.vmm.twins import by_name, version
from rekindle_lab import guests
from rekindle_lab.guests import KERNEL_WORDS, READY_DEADLINE_S, Guest
from rekindle_lab.rekindle import Probe, Rekindle, failed_requests, gap_around
from rekindle_lab.slow import run
from rekindle_lab.stores import Store, on_disk

from . import private_libvirt
from .private_libvirt import IMAGES, Attempt, PrivateLibvirt
from .rows import MANAGEDSAVE, Row

T = TypeVar("T")
IMAGE = "micro"
ECHO_PORT = 7
LOAD_MB = 20
"""MB of its memory that a guest writes each second while it is measured."""
PAGE_BYTES = 4096
LOAD_S = 1.0
"""Time for which a guest's writes are counted."""
FIRST_REPLY_S = 2.0
"""Time limit of a first reply. A new connection is faster than a retransmission of TCP."""
CLIENT = ("--timeout", "100ms")
"""Options of the client of a domain, which connects again when it has waited this long. A connection outlives QEMU; but
while the guest is away, TCP waits longer and longer before it repeats a packet."""
CLIENT_EVERY = "2ms"
ABSENCE_US = 100_000
"""A client of libvirt that waits longer than this for an answer finds libvirt absent: ten times its interval."""
QEMU_VARIABLES = ("QEMU_OLD", "QEMU_NEW", "QEMU_NEWEST")
"""Environment variables of the versions of QEMU, the oldest first."""
BRIDGE = "rkbench0"
"""Bridge for domains, in the network namespace of the run."""
BRIDGE_NETWORK = "10.89.0"


@dataclass(frozen=True)
class Domain(Guest):
    """A domain of libvirt with the micro guest, and with a tap in `BRIDGE`."""

    @property
    def address(self) -> str:
        """Address at which its clients reach it."""
        return f"{BRIDGE_NETWORK}.{self.index + 1}"

    @property
    def command_line(self) -> str:
        """Kernel command line of the guest."""
        root = "" if self.image.kind == IMAGE else "root=/dev/vda rw "
        words = f"{root}{KERNEL_WORDS} rekindle.ip={self.address}/24 rekindle.tick=0"
        return f"{words} rekindle.touch={self.touch}" if self.touch else words

    def wait_ready(self, deadline: float = READY_DEADLINE_S) -> None:
        """Waits until the guest's services answer, touched memory included, for at most `deadline` seconds."""
        end = time.monotonic() + deadline
        while True:
            try:
                if self.command("uptime", FIRST_REPLY_S).startswith("ok"):
                    return
            except OSError:  # it is booting
                time.sleep(0.1)
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name}: not ready within {deadline:g} s")

    @property
    def machine(self) -> str:
        """Machine type."""
        return "q35"

    @property
    def boot_folder(self) -> Path:
        """Folder of kernel and initrd, as libvirt sees it."""
        return IMAGES

    @property
    def processors(self) -> str:
        """Virtual processors in libvirt's XML."""
        return "<vcpu>1</vcpu>"

    @property
    def devices(self) -> str:
        """Devices in libvirt's XML, besides those that every domain has."""
        return ""

    def xml(self, qemu: str) -> str:
        """Returns libvirt's description."""
        card = f"<source bridge='{BRIDGE}'/><mac address='52:54:00:00:01:{self.index:02x}'/><model type='virtio'/>"
        return f"""
<domain type='qemu'>
  <name>{self.name}</name><memory unit='MiB'>{self.memory_mib}</memory>{self.processors}
  <os><type arch='x86_64' machine='{self.machine}'>hvm</type>
  <kernel>{self.boot_folder}/vmlinuz</kernel><initrd>{self.boot_folder}/initrd</initrd>
  <cmdline>{self.command_line}</cmdline></os>
  <features><acpi/></features>
  <devices>
    <emulator>{qemu}</emulator>
    <serial type='pty'/>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>
    <memballoon model='virtio'/>
    {self.devices}
    <interface type='bridge'>{card}<driver name='qemu'/></interface>
  </devices>
</domain>"""


AnyDomain = TypeVar("AnyDomain", bound=Domain)


@dataclass
class LibvirtEnvironment(Environment):
    """The environment of the libvirt benchmark: a private libvirt with domains, and VMs of Rekindle."""

    libvirt: PrivateLibvirt
    domains: Rekindle
    """Rekindle for the domains, which finds the private libvirt; `rekindle` is for VMs of Rekindle."""

    def domain(
        self, name: str, memory_mib: int, index: int, *, kind: type[AnyDomain] = Domain, touch: str | None = "all"
    ) -> AnyDomain:
        """Returns a domain that touches all of its RAM. Its name is one that no other libvirt of the host has."""
        return kind(
            f"rekindle-bench-{os.getpid()}-{name}",
            image=self.image(IMAGE),
            memory_mib=memory_mib,
            index=index,
            touch=touch,
            netns=self.netns,
            ram_dir=self.ram_dir,
            disk_dir=self.disk_dir,
        )

    @contextmanager
    def running(self, domain: Domain, *, wait: bool = True, qemu: str | None = None) -> Iterator[Domain]:
        """Runs a domain, ready unless `wait` is false; destroys it at the end. `qemu`: not the QEMU of the run."""
        try:
            self.libvirt.create(domain.name, domain.xml(qemu or self.qemu))
            if wait:
                domain.wait_ready()
            yield domain
        finally:
            try:
                self.libvirt.destroy(domain.name)
            except OSError as error:  # the keeper ends it with the run
                self.log(f"{domain.name} may still be running: {error}")

    def replace(self, names: Sequence[str]) -> dict[str, Any]:
        """Replaces the QEMUs of domains by one command; returns its JSON."""
        return self.domains.call("replace-qemu", *names)

    def managedsave(self, name: str) -> dict[str, Any]:
        """Replaces the QEMU of a domain as libvirt's users do without Rekindle; there is no JSON."""
        self.libvirt.virsh("managedsave", name)
        self.libvirt.virsh("start", name)
        return {}

    def measure(self, row: Row, guest: Guest, act: Callable[[], dict[str, Any]]) -> None:
        """Replaces the QEMU of a guest, which writes its memory, by `act`, with a client at it; appends the row.

        `act` returns the JSON of Rekindle, or an empty one.
        """
        with loaded(guest):
            row.load_mb, row.written_mb = LOAD_MB, written_mb(guest)
            options = CLIENT if isinstance(guest, Domain) else ("--timeout", "300s")
            with self.rekindle.probes([(guest.echo_url, guest.netns)], *options, every=CLIENT_EVERY) as [probe]:
                document, row.command_us = timed(act)
                guest.wait_ready()
        fill_gap(row, probe, replaced(row, document) if row.how != MANAGEDSAVE else {})
        self.rows.append(row)

    def store(self) -> Store:
        """Returns a folder for stores of checkpoints on the machine's disk."""
        return on_disk(self.disk_dir / "stores")

    @contextmanager
    def attached(self, domain: Domain) -> Iterator[None]:
        """Attaches a domain, to protect it; detaches it at the end."""
        name = domain.name
        self.domains.call("attach", name, "--libvirt", name, "--connect", private_libvirt.URI)
        try:
            yield
        finally:
            self.domains.call("detach", name)


def timed(act: Callable[[], T]) -> tuple[T, int]:
    """Returns the result of `act`, and its duration in microseconds."""
    began = time.monotonic()
    result = act()
    return result, int((time.monotonic() - began) * 1e6)


@contextmanager
def loaded(guest: Guest) -> Iterator[None]:
    """Lets a guest write its memory while the body runs: all of it in turn, `LOAD_MB` per second."""
    guest.command(f"dirty {LOAD_MB}")
    yield
    guest.command("dirty 0")


def written_mb(guest: Guest) -> float:
    """Returns how many MB of its memory a loaded guest writes per second."""

    def pages() -> int:
        """Returns the number of pages that the guest has written so far."""
        return int(guest.command(f"dirty {LOAD_MB}").split()[1])

    before, began = pages(), time.monotonic()
    time.sleep(LOAD_S)
    return (pages() - before) * PAGE_BYTES / 1e6 / (time.monotonic() - began)


def replaced(row: Row, document: dict[str, Any]) -> dict[str, Any]:
    """Fills a row from the JSON of its replacement; returns the guest's part. Raises unless it was replaced."""
    [vm] = by_name(document, [row.vm])
    row.stopped_us, row.stop_host_us, row.resume_host_us = vm["stopped_us"], vm["stop_host_us"], vm["resume_host_us"]
    row.from_version, row.to_version, row.steps = version(vm.get("from")), version(vm.get("to")), vm["steps"]
    return vm


def fill_gap(row: Row, probe: Probe, vm: dict[str, Any]) -> None:
    """Fills the client's gap into the row of a replacement. `vm`: the guest's part of Rekindle's JSON, or empty."""
    start, end, length = gap_around(probe.report, vm.get("stop_host_us"), vm.get("resume_host_us"))
    row.gap_us, row.gap_start_host_us, row.gap_end_host_us = length, start or None, end or None
    row.answered, row.failed = probe.report["answered"], failed_requests(probe.report)


def absences_us(attempts: Sequence[Attempt]) -> list[int]:
    """Returns the times without an answer for a client of libvirt, from one answer to the next, in microseconds."""
    durations, last, has_failed = [], None, False
    for attempt in attempts:
        if not attempt.answered:
            has_failed = True
            continue
        if last is not None:
            duration = attempt.end_host_us - last
            if has_failed or duration > ABSENCE_US:
                durations.append(duration)
        last, has_failed = attempt.end_host_us, False
    return durations


def reported_away_us(document: dict[str, Any]) -> int | None:
    """Returns how long libvirt's daemon was absent by Rekindle's report; `None` if this version does not report it."""
    return sum(document["daemon_absences_us"]) if "daemon_absences_us" in document else None


def make_bridge(netns: str) -> None:
    """Makes the bridge of the domains, in which this machine has the first address."""
    run("ip", "-n", netns, "link", "add", BRIDGE, "type", "bridge")
    run("ip", "-n", netns, "address", "add", f"{BRIDGE_NETWORK}.1/24", "dev", BRIDGE)
    run("ip", "-n", netns, "link", "set", BRIDGE, "up")


@contextmanager
def environment(setup: Setup) -> Iterator[LibvirtEnvironment]:
    """Sets up the environment: folders, a tmpfs for RAM of Rekindle's VMs, a network namespace, a private libvirt."""
    image = guests.build(setup.root, IMAGE)
    files = [image.folder / name for name in ("vmlinuz", "initrd")]
    with setup.workspace() as space:
        ours = Rekindle(setup.binary, space.work / "run")
        make_bridge(space.namespaces[0])
        qemus = [Path(os.environ[name]) for name in QEMU_VARIABLES]
        with private_libvirt.started(space.namespaces[0], files, qemus, space.disk / "saves") as libvirt:
            domains = libvirt.rekindle(ours, space.work)
            yield setup.environment(LibvirtEnvironment, space, libvirt=libvirt, domains=domains)
