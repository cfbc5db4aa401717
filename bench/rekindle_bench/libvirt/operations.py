"""Case `works`: libvirt's operations on a domain whose QEMU was replaced, on a restored one, and on an untouched one.

`GROUPS` lists them. The operations of a group are tried one after the other on one domain, which is booted for the
group, and then replaced, restored or left alone. An operation that fails on an untouched domain proves nothing.
"""

import os
import re
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab import netns
from rekindle_lab.slow import run

from .domains import BRIDGE, Domain, LibvirtEnvironment
from .plan import Plan
from .private_libvirt import SAVES, PrivateLibvirt
from .restored import lose_host, restore
from .rows import REPLACED_DOMAIN, RESTORED_DOMAIN, UNTOUCHED, Row

DEADLINE_S = 60.0
POLL_S = 0.1
DISK_MIB = 64
"""Size of each disk."""
PCI_PORTS = 16
"""PCI ports of the domain: more than it has devices, so that some can be plugged in while it runs."""
CARD_MAC = "52:54:00:00:02:01"
SPARE_MIB = 64
"""Memory that the balloon takes from the guest."""


@dataclass(frozen=True)
class EquippedDomain(Domain):
    """A domain with a disk, a screen, a spare processor, and free ports; its console prints a line each second."""

    @property
    def disk(self) -> Path:
        """Disk of the domain, as it sees it."""
        return SAVES / f"{self.name}.qcow2"

    @property
    def command_line(self) -> str:
        """Kernel command line of the guest."""
        return super().command_line.replace("rekindle.tick=0", "rekindle.tick=1000")

    @property
    def processors(self) -> str:
        """Virtual processors in libvirt's XML."""
        return "<vcpu current='1'>2</vcpu>"

    @property
    def devices(self) -> str:
        """Devices in libvirt's XML."""
        ports = "<controller type='pci' model='pcie-root-port'/>" * PCI_PORTS
        disk = f"<driver name='qemu' type='qcow2'/><source file='{self.disk}'/><target dev='vda' bus='virtio'/>"
        screen = "<graphics type='vnc' port='-1' autoport='yes'/><video><model type='vga'/></video>"
        return f"<controller type='pci' model='pcie-root'/>{ports}<disk type='file' device='disk'>{disk}</disk>{screen}"


@dataclass(frozen=True)
class Subject:
    """The domain on which operations are tried."""

    libvirt: PrivateLibvirt
    domain: EquippedDomain

    def virsh(self, command: str, *arguments: str) -> str:
        """Runs a command of virsh on the domain."""
        return self.libvirt.virsh(command, self.domain.name, *arguments)

    def expect(self, what: str, condition: Callable[[], object]) -> None:
        """Waits until a condition is true; raises if it is not by the deadline."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {DEADLINE_S:g} s")
            time.sleep(POLL_S)

    def expect_state(self, state: str) -> None:
        """Waits until libvirt reports this state."""
        self.expect(f"the domain is {state}", lambda: self.virsh("domstate").strip() == state)

    def boot_id(self) -> str:
        """Returns the number of the guest's boot, once its services answer."""
        self.domain.wait_ready()
        return self.domain.command("boot-id")

    def file(self, name: str) -> Path:
        """Returns a path for a file that an operation makes, as libvirt sees it."""
        return SAVES / f"{self.domain.name}-{name}"

    def seen_from_here(self, path: Path) -> Path:
        """Returns the path by which this process reaches a file of the private libvirt."""
        return self.libvirt.seen_from_here(path)

    def create_disk(self, path: Path, form: str = "qcow2") -> None:
        """Makes an empty disk."""
        run("qemu-img", "create", "-q", "-f", form, str(self.seen_from_here(path)), f"{DISK_MIB}M")


def _suspend(subject: Subject) -> None:
    subject.virsh("suspend")
    subject.expect_state("paused")
    subject.virsh("resume")
    subject.expect_state("running")
    subject.domain.wait_ready()


def _domstats(subject: Subject) -> None:
    """Statistics of all groups, which libvirt asks QEMU for."""
    statistics = subject.virsh("domstats")
    for name in ("state.state", "cpu.time", "balloon.current", "vcpu.current", "net.0.rx.bytes", "block.0.rd.reqs"):
        if f"{name}=" not in statistics:
            raise RuntimeError(f"domstats has no {name}")


def _setmem(subject: Subject) -> None:
    def balloon() -> int:
        found = re.search(r"actual (\d+)", subject.virsh("dommemstat"))
        return int(found[1]) if found else 0

    full = balloon()
    subject.virsh("setmem", f"{full - SPARE_MIB * 1024}", "--live")
    subject.expect("the guest gives memory back", lambda: balloon() < full)
    subject.virsh("setmem", f"{full}", "--live")
    subject.expect("the guest has its memory again", lambda: balloon() == full)


def _setvcpus(subject: Subject) -> None:
    subject.virsh("setvcpus", "2", "--live")
    if subject.virsh("vcpucount", "--live", "--active").strip() != "2":
        raise RuntimeError("libvirt does not count the second processor")


def _attach_disk(subject: Subject) -> None:
    path = subject.file("plugged.raw")
    subject.create_disk(path, "raw")
    subject.virsh("attach-disk", str(path), "vdb", "--live")
    subject.expect("the guest reads the disk", lambda: subject.domain.command("read vdb 0 1").startswith("ok"))
    subject.virsh("detach-disk", "vdb", "--live")
    subject.expect("the disk is gone", lambda: "vdb" not in subject.virsh("domblklist"))


def _attach_card(subject: Subject) -> None:
    source = ("--type", "bridge", "--source", BRIDGE, "--model", "virtio", "--mac", CARD_MAC)
    subject.virsh("attach-interface", *source, "--live")
    if CARD_MAC not in subject.virsh("domiflist"):
        raise RuntimeError("libvirt does not list the card")
    subject.virsh("detach-interface", "--type", "bridge", "--mac", CARD_MAC, "--live")
    subject.expect("the card is gone", lambda: CARD_MAC not in subject.virsh("domiflist"))


def _console(subject: Subject) -> None:
    """The pty that `virsh console` opens has the guest's output."""
    terminal = os.open(subject.virsh("ttyconsole").strip(), os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        end, text = time.monotonic() + DEADLINE_S, b""
        while b"tick " not in text:
            if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"no line on the console within {DEADLINE_S:g} s")
            text += os.read(terminal, 4096)
    finally:
        os.close(terminal)


def _vnc(subject: Subject) -> None:
    """A client is greeted at the address that libvirt names."""
    display = subject.virsh("vncdisplay").strip()
    host, _, number = display.rpartition(":")
    with netns.connect(subject.domain.netns, host or "127.0.0.1", 5900 + int(number), DEADLINE_S) as client:
        client.settimeout(DEADLINE_S)
        greeting = client.recv(12)
    if not greeting.startswith(b"RFB "):
        raise RuntimeError(f"a VNC client at {display} is greeted with {greeting!r}")


def _screenshot(subject: Subject) -> None:
    path = subject.file("screen")
    subject.virsh("screenshot", str(path))
    if subject.seen_from_here(path).stat().st_size == 0:
        raise RuntimeError("the screenshot is empty")


def _dump(subject: Subject) -> None:
    path = subject.file("dump")
    subject.virsh("dump", str(path), "--memory-only", "--live")
    with subject.seen_from_here(path).open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise RuntimeError("the dump is no ELF file")
    subject.domain.wait_ready()


def _backup(subject: Subject) -> None:
    """A full backup of the disk, which QEMU writes while the guest runs."""
    copy, xml = subject.file("backup.qcow2"), subject.file("backup.xml")
    disk = f"<disk name='vda' type='file'><driver type='qcow2'/><target file='{copy}'/></disk>"
    subject.seen_from_here(xml).write_text(f"<domainbackup mode='push'><disks>{disk}</disks></domainbackup>")
    subject.virsh("backup-begin", str(xml))
    subject.expect("the backup ends", lambda: "None" in subject.virsh("domjobinfo"))
    run("qemu-img", "check", "-q", str(subject.seen_from_here(copy)))


def _snapshot_and_commit(subject: Subject) -> None:
    options = ("--disk-only", "--atomic", "--no-metadata")
    subject.virsh("snapshot-create-as", "bench", *options, "--diskspec", f"vda,file={subject.file('overlay.qcow2')}")
    subject.domain.command("write vda 0 16 1")
    subject.virsh("blockcommit", "vda", "--active", "--pivot", "--wait")
    if str(subject.domain.disk) not in subject.virsh("domblklist"):
        raise RuntimeError("the disk is not on its image again")
    subject.domain.wait_ready()


def _blockcopy(subject: Subject) -> None:
    copy = subject.file("copy.qcow2")
    subject.virsh("blockcopy", "vda", str(copy), "--transient-job", "--pivot", "--wait")
    if str(copy) not in subject.virsh("domblklist"):
        raise RuntimeError("the disk is not on its copy")
    subject.domain.command("write vda 16 16 1")


def _reset(subject: Subject) -> None:
    before = subject.boot_id()
    subject.virsh("reset")
    subject.expect("the guest boots again", lambda: subject.boot_id() != before)


def _reboot(subject: Subject) -> None:
    before = subject.boot_id()
    subject.virsh("reboot", "--mode", "acpi")
    subject.expect("the guest boots again", lambda: _boot_id_or_none(subject) not in (None, before))


def _boot_id_or_none(subject: Subject) -> str | None:
    """Returns the number of the guest's boot; `None` while it does not answer."""
    try:
        return subject.domain.command("boot-id", 2.0)
    except OSError:
        return None


def _save(subject: Subject) -> None:
    before, path = subject.boot_id(), subject.file("saved")
    subject.virsh("save", str(path))
    subject.libvirt.virsh("restore", str(path))
    _require_boot(subject, before)


def _managedsave(subject: Subject) -> None:
    before = subject.boot_id()
    subject.virsh("managedsave")
    subject.virsh("start")
    _require_boot(subject, before)


def _require_boot(subject: Subject, boot: str) -> None:
    if subject.boot_id() != boot:
        raise RuntimeError("the guest was booted")


def _undefine(subject: Subject) -> None:
    """A running domain becomes a transient one, and can be defined again."""
    definition = subject.file("definition.xml")
    subject.seen_from_here(definition).write_text(subject.virsh("dumpxml", "--inactive"))
    subject.virsh("undefine")
    if "yes" in _info(subject, "Persistent"):
        raise RuntimeError("the domain is still defined")
    subject.libvirt.virsh("define", str(definition))
    if "yes" not in _info(subject, "Persistent"):
        raise RuntimeError("the domain is not defined again")


def _info(subject: Subject, title: str) -> str:
    lines = subject.virsh("dominfo").splitlines()
    return next(line for line in lines if line.startswith(title))


def _shutdown(subject: Subject) -> None:
    subject.virsh("shutdown", "--mode", "acpi")
    subject.expect_state("shut off")
    subject.virsh("start")
    subject.domain.wait_ready()


def _destroy(subject: Subject) -> None:
    subject.virsh("destroy")
    subject.expect_state("shut off")


Operation = Callable[[Subject], None]
# An operation that starts another QEMU is the last one of its group, since that QEMU is libvirt's.
GROUPS: tuple[dict[str, Operation], ...] = (
    {
        "suspend and resume": _suspend,
        "domstats": _domstats,
        "setmem": _setmem,
        "setvcpus": _setvcpus,
        "attach and detach a disk": _attach_disk,
        "attach and detach a card": _attach_card,
        "console": _console,
        "VNC": _vnc,
        "screenshot": _screenshot,
        "dump": _dump,
        "backup": _backup,
        "snapshot and blockcommit": _snapshot_and_commit,
        "blockcopy": _blockcopy,
        "reset": _reset,
        "undefine and define": _undefine,
        "destroy": _destroy,
    },
    {"reboot": _reboot, "save and restore": _save},
    {"managedsave and start": _managedsave},
    {"shutdown": _shutdown},
)


def works(env: LibvirtEnvironment, plan: Plan) -> None:
    """Tries libvirt's operations on domains: untouched, with a replaced QEMU, and restored; appends a row for each."""
    for round_number in range(plan.works_rounds):
        for group in GROUPS:
            for how in (UNTOUCHED, REPLACED_DOMAIN, RESTORED_DOMAIN):
                env.log(f"works: {how}: {', '.join(group)}")
                with _booted(env, plan.works_mib) as subject:
                    if how == REPLACED_DOMAIN:
                        env.replace([subject.domain.name])
                    elif how == RESTORED_DOMAIN:
                        _restore(env, subject.domain)
                    for name, operation in group.items():
                        row = Row(
                            case="works",
                            how=how,
                            memory_mib=plan.works_mib,
                            guests=1,
                            round=round_number,
                            vm=subject.domain.name,
                            operation=name,
                        )
                        row.worked, row.failure = _attempt(subject, operation)
                        env.rows.append(row)


def _restore(env: LibvirtEnvironment, domain: EquippedDomain) -> None:
    """Replaces the domain by its checkpoint. Nothing of Rekindle is left in it afterwards."""
    store = env.store().fresh(domain.name)
    lose_host(env, domain, store, "--disk", "overlays")
    restore(env, domain, store)
    env.domains.call("detach", domain.name)
    domain.wait_ready()
    store.remove()


def _attempt(subject: Subject, operation: Operation) -> tuple[bool, str]:
    """Returns whether an operation works, and what is wrong if it does not."""
    try:
        operation(subject)
    except (OSError, RuntimeError, ValueError, StopIteration) as error:
        # The command line of virsh comes first.
        return False, " ".join(str(error).split()).rpartition(": exit status ")[2]
    return True, ""


@contextmanager
def _booted(env: LibvirtEnvironment, mib: int) -> Iterator[Subject]:
    """Boots a domain; removes it and its files at the end."""
    domain = env.domain("works", mib, 30, kind=EquippedDomain, touch=None)
    subject = Subject(env.libvirt, domain)
    with ExitStack() as stack:
        stack.callback(_remove_files, subject)
        subject.create_disk(domain.disk)
        stack.enter_context(env.running(domain))
        yield subject


def _remove_files(subject: Subject) -> None:
    for path in subject.seen_from_here(SAVES).glob(f"{subject.domain.name}*"):
        path.unlink()
