"""Peers: other ways to restart a guest with its kernel, on QEMU alone. Measured by turns with Rekindle.

- `qboot`: the firmware `qboot.rom`, which does nothing else, immediately starts the same kernel and RAM disk.
  Compare with a cold reboot.
- `microvm`: the same kernel and RAM disk on QEMU's machine `microvm`, as in Firecracker: few devices, no legacy clock
  (its PCI bus is on, since the guests' initrds have drivers for that only). Only under KVM: under emulation Debian's
  kernel has no source to calibrate its clocks, and does not boot.
- `incoming`: `-incoming` of a full save (`stop`, `migrate` to a file) of the guest with its services up.
  Compare with a phase.
- `loadvm`: `-loadvm` of an internal snapshot (`savevm`) in a qcow2 image, of the same moment. Compare with a phase.

Rekindle does most of a load before its previous guest ends. `load_us` includes that part, as it includes the whole load
of a peer.

All peers get QEMU's own disks (qcow2 over the image) and RAM, and the same accelerator, processor and number of
processors. The previous guest of a peer is not shut down: its QEMU is killed, and its end is not in the peer's time.
For Rekindle the time is also given without the previous guest's end. `incoming` and `loadvm` return to an older disk,
and lose later writes; `phase` does not.
"""

import itertools
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rekindle_bench.case import NotPlannedError
from rekindle_lab import netns
from rekindle_lab.os_guest import MICRO_DISK_BYTES, OsGuest, ask_often
from rekindle_lab.page_client import PageClient, longest_gap
from rekindle_lab.peers.cpr import PeerError
from rekindle_lab.qmp import Qmp, QmpError
from rekindle_lab.slow import run

from .plan import Plan
from .rebooted_guests import SETTLE_S, OsEnvironment
from .rows import PEERS, Row

INDEX = 50
"""First network of the guests of this case: `Guest.index`."""
DEADLINE_S = 120.0
"""Deadline of one QMP command or event."""
SAME_OPTIONS = ("-accel", "-cpu", "-smp")
"""Options of Rekindle's QEMU that a peer's QEMU gets, too."""
SNAPSHOT = "ready"
"""Name of the internal snapshot of `loadvm`."""
SAVED_DISK = ".then"
"""Suffix of the copy of a disk at the moment of the save."""
OURS = ("cold", "phase-services")
"""The ways of Rekindle with which peers are compared."""
BOOTED = ("qboot", "microvm")
"""Peers that keep no state."""


@dataclass
class Peer:
    """One guest of a peer, in one QEMU after the other."""

    env: OsEnvironment
    guest: OsGuest
    how: str
    """The peer: a member of `PEERS`."""
    like: list[str]
    """Arguments from Rekindle's command line that the peer uses, too: `SAME_OPTIONS`."""
    tap: netns.Tap
    folder: Path
    """Folder of the peer's disks, sockets and logs."""
    process: subprocess.Popen[bytes] | None = None
    disks: list[Path] = field(default_factory=list)

    def make_disks(self) -> None:
        """Creates overlays of the image's disks, or an empty disk if it has none, since `savevm` needs a disk."""
        folder = self.guest.image.folder
        names = [] if self.guest.kind == "micro" else ["disk.raw", "data.raw"]
        for name in names:
            path = self.folder / f"{name}.qcow2"
            run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", folder / name, path)
            self.disks.append(path)
        if not names:
            path = self.folder / "empty.qcow2"
            run("qemu-img", "create", "-q", "-f", "qcow2", path, str(MICRO_DISK_BYTES))
            self.disks.append(path)

    @property
    def qmp(self) -> Path:
        """Socket of QEMU's monitor."""
        return self.folder / "qmp.sock"

    def words(self) -> list[str]:
        """Arguments of QEMU."""
        image = self.guest.image.folder
        machine = ["-machine", "microvm,pcie=on" if self.how == "microvm" else "q35"]
        if self.how == "qboot":
            machine += ["-bios", "qboot.rom"]
        words = ["-nodefaults", "-no-user-config", "-display", "none", *machine, *self.like]
        words += ["-m", str(self.guest.memory_mib), "-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd")]
        words += ["-append", self.guest.command_line, "-serial", f"file:{self.folder / 'console.log'}"]
        words += ["-qmp", f"unix:{self.qmp},server=on,wait=off"]
        words += ["-netdev", f"tap,id=net0,fd={self.tap.fd}", "-device", "virtio-net-pci,netdev=net0"]
        for number, disk in enumerate(self.disks):
            words += ["-drive", f"if=none,id=disk{number},format=qcow2,file={disk}"]
            words += ["-device", f"virtio-blk-pci,drive=disk{number}"]
        return words

    def start(self, *more: str) -> None:
        """Starts a QEMU with the guest."""
        self.qmp.unlink(missing_ok=True)
        with (self.folder / "qemu.log").open("wb") as log:
            self.process = subprocess.Popen(
                [self.env.qemu, *self.words(), *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self.tap.fd],
                start_new_session=True,
            )

    def monitor(self) -> Qmp:
        """Connects to QEMU's monitor."""
        process = self.process
        return Qmp(self.qmp, DEADLINE_S, alive=lambda: process is not None and process.poll() is None)

    def end(self) -> None:
        """Kills the QEMU."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def save(self) -> None:
        """Saves the guest in the peer's way, and ends its QEMU."""
        with self.monitor() as qmp:
            if self.how == "loadvm":
                output = qmp.execute("human-monitor-command", {"command-line": f"savevm {SNAPSHOT}"})
                if output.strip():
                    raise PeerError(f"savevm: {output.strip()}")
            else:
                qmp.execute("stop")
                qmp.execute("migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]})
                qmp.execute("migrate-set-parameters", {"max-bandwidth": 1 << 50})
                qmp.execute("migrate", {"uri": f"file:{self.folder / 'saved'}"})
                self._migrated(qmp)
            qmp.execute("quit")
        if self.process is not None:
            self.process.wait(DEADLINE_S)
            self.process = None
        for disk in self.disks:
            shutil.copyfile(disk, disk.with_suffix(SAVED_DISK))

    def _migrated(self, qmp: Qmp) -> None:
        while (status := qmp.wait_event("MIGRATION", DEADLINE_S).data["status"]) != "completed":
            if status in ("failed", "cancelled"):
                raise PeerError(f"{self.how}: the migration has {status}: {(self.folder / 'qemu.log').read_text()}")

    def restart(self, row: Row) -> None:
        """Kills the QEMU and starts a new one with the guest."""
        self.end()
        if self.how == "incoming":
            for disk in self.disks:
                shutil.copyfile(disk.with_suffix(SAVED_DISK), disk)
        row.ended_host_us = time.time_ns() // 1000
        if self.how in BOOTED:
            self.start()
            return
        self.start("-S", *(["-loadvm", SNAPSHOT] if self.how == "loadvm" else ["-incoming", "defer"]))
        with self.monitor() as qmp:
            if self.how == "incoming":
                qmp.execute("migrate-set-capabilities", {"capabilities": [{"capability": "events", "state": True}]})
                qmp.execute("migrate-incoming", {"uri": f"file:{self.folder / 'saved'}"})
                self._migrated(qmp)
            qmp.execute("cont")
            row.running_host_us = qmp.wait_event("RESUME").host_us
        row.load_us = row.running_host_us - row.ended_host_us

    def round(self, number: int) -> Row:
        """Restarts the guest with a client at it, and returns the row."""
        row = Row(case="peers", guest=self.guest.kind, memory_mib=self.guest.memory_mib, how=self.how, round=number)
        ask_often(self.guest.netns)
        with PageClient(self.guest.netns, self.guest.address, self.guest.path) as client:
            client.wait(10)
            time.sleep(SETTLE_S)
            began_us = time.time_ns() // 1000
            try:
                self.restart(row)
            except QmpError as error:
                log = (self.folder / "qemu.log").read_text(errors="replace")[-1000:]
                raise PeerError(f"{self.how}: {error}; QEMU's log: {log}") from error
            client.wait(10, after_host_us=row.running_host_us or time.time_ns() // 1000)
            time.sleep(SETTLE_S)
        gap = longest_gap(client.answers, began_us)
        row.silent_host_us, row.served_host_us = gap.start_host_us, gap.end_host_us
        row.gap_us, row.first_us = gap.us, gap.first_us
        return row


def has_kvm(env: OsEnvironment, guest: OsGuest) -> bool:
    """Returns whether the guest runs under KVM."""
    arguments = env.rekindle.show(guest.name)["command_line"]
    return any(option == "-accel" and value.startswith("kvm") for option, value in itertools.pairwise(arguments))


@contextmanager
def peer(env: OsEnvironment, like: OsGuest, how: str, index: int) -> Iterator[Peer]:
    """Starts a guest with the kind, memory and processors of `like`; saves and restarts it if `how` needs a save."""
    env.need(memory_mib=int(like.memory_mib * 1.2) + 256, disk_mib=3 * like.memory_mib)
    arguments = itertools.pairwise(env.rekindle.show(like.name)["command_line"])
    same = [word for option, value in arguments if option in SAME_OPTIONS for word in (option, value)]
    guest = OsGuest(
        f"{like.kind}-{how}",
        image=like.image,
        memory_mib=like.memory_mib,
        index=index,
        touch=None,
        netns=env.netns,
        ram_dir=env.ram_dir,
        disk_dir=env.disk_dir,
        kind=like.kind,
    )
    folder = env.disk_dir / guest.name
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        tap = netns.Tap(f"rkp{index}x{like.index}", env.netns, guest.host_address)
        stack.callback(tap.close)
        started = Peer(env=env, guest=guest, how=how, like=same, tap=tap, folder=folder)
        stack.callback(started.end)
        started.make_disks()
        started.start()
        guest.wait_ready()
        if how not in BOOTED:
            started.save()
            started.restart(Row(case="peers", guest=guest.kind, memory_mib=guest.memory_mib, how=how, round=0))
            guest.wait_ready()
        yield started


def peers(env: OsEnvironment, plan: Plan) -> None:
    """Measures Rekindle and each peer, by turns."""
    if not any(plan.peers.values()):
        raise NotPlannedError
    for kind, rounds in plan.peers.items():
        if not rounds:
            continue
        index = INDEX + (0 if kind == "micro" else 10)
        with ExitStack() as stack:
            plain = stack.enter_context(env.ours(env.os_guest(kind, index, plan.memory_mib)))
            keeps_phases = stack.enter_context(env.ours(env.os_guest(kind, index + 1, plan.memory_mib, phases=True)))
            env.wait_saved(keeps_phases)
            restart_in: dict[str, Callable[[int], Row]] = {}  # by way: restarts a guest in a round, and returns the row
            for how in OURS:
                guest = plain if how == "cold" else keeps_phases
                restart_in[how] = partial(env.reboot, guest, how, case="peers")
            for peer_index, how in enumerate(PEERS, start=index + 2):
                if how == "microvm" and not has_kvm(env, plain):
                    env.left_out.append(f"{kind}: peer microvm: without KVM Debian's kernel does not boot in it")
                    continue
                restart_in[how] = stack.enter_context(peer(env, plain, how, peer_index)).round
            for round_number in range(rounds):
                for how, restart in restart_in.items():
                    row = restart(round_number)
                    env.rows.append(row)
                    env.log(f"peers: {kind}: {round_number + 1} of {rounds}: {how}: {(row.gap_us or 0) / 1e6:.2f} s")
