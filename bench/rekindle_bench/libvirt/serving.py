"""Domains with a Debian guest, whose kernel and disks are files of their own, and commands in it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab import guests, netns
from rekindle_lab.guest_shell import in_guest
from rekindle_lab.guests import READY_DEADLINE_S
from rekindle_lab.slow import run
from rekindle_lab.stores import forget

from .domains import Domain, LibvirtEnvironment
from .private_libvirt import SAVES


@dataclass(frozen=True)
class ServingDomain(Domain):
    """A domain with a Debian guest. In a trial `micro` takes its place, without a root disk."""

    data_disks: tuple[str, ...]
    """Formats of the disks besides the root disk."""
    machine_type: str

    @property
    def machine(self) -> str:
        """Machine type."""
        return self.machine_type

    @property
    def boot_folder(self) -> Path:
        """Folder of the kernel and the disks, as libvirt sees it."""
        return SAVES / self.name

    @property
    def stands_in(self) -> bool:
        """Whether it is the guest of a trial."""
        return self.image.kind == "micro"

    @property
    def disks(self) -> list[tuple[Path, str]]:
        """Files and formats of all disks, as libvirt sees them."""
        root = [] if self.stands_in else [(self.boot_folder / "disk.raw", "raw")]
        return root + [(self.boot_folder / f"data{number}.{kind}", kind) for number, kind in enumerate(self.data_disks)]

    @property
    def devices(self) -> str:
        """Devices in libvirt's XML."""
        return "".join(
            f"<disk type='file' device='disk'><driver name='qemu' type='{kind}'/><source file='{path}'/>"
            f"<target dev='vd{chr(ord('a') + number)}' bus='virtio'/></disk>"
            for number, (path, kind) in enumerate(self.disks)
        )

    def data_device(self, number: int) -> str:
        """Returns the guest's name of a data disk."""
        return f"/dev/vd{chr(ord('a') + number + len(self.disks) - len(self.data_disks))}"

    @property
    def web_url(self) -> str:
        """URL of a page."""
        return f"http://{self.address}/{'bytes/16384' if self.stands_in else 'files/000.bin'}"

    def wait_ready(self, deadline: float = READY_DEADLINE_S) -> None:
        """Waits until the guest's services answer."""
        super().wait_ready(deadline)
        for port in (80,) if self.stands_in else (80, 22):
            netns.connect(self.netns, self.address, port, deadline).close()

    def run(self, command: str) -> str:
        """Runs a command in the guest, and returns its output."""
        return in_guest(self, command)


@contextmanager
def served(
    env: LibvirtEnvironment,
    name: str,
    index: int,
    *,
    image: str,
    mib: int,
    qemu: str | None = None,
    machine: str = "q35",
    data_disks: tuple[str, ...] = (),
    data_mib: int = 64,
) -> Iterator[ServingDomain]:
    """Runs a domain with a Debian guest; removes its files at the end. `qemu`: not the QEMU of the run."""
    domain = ServingDomain(
        f"rekindle-bench-{os.getpid()}-{name}",
        image=env.image(image),
        memory_mib=mib,
        index=index,
        touch=None,
        netns=env.netns,
        ram_dir=env.ram_dir,
        disk_dir=env.disk_dir,
        data_disks=data_disks,
        machine_type=machine,
    )
    folder = env.libvirt.seen_from_here(domain.boot_folder)
    with ExitStack() as stack:
        folder.mkdir()
        stack.callback(run, "rm", "-rf", folder)
        for file in ("vmlinuz", "initrd", *([] if domain.stands_in else ["disk.raw"])):
            guests.copy_sparse(domain.image.folder / file, folder / file)
            forget(folder / file)
        for path, kind in domain.disks[len(domain.disks) - len(data_disks) :]:
            run("qemu-img", "create", "-q", "-f", kind, folder / path.name, f"{data_mib}M")
        stack.enter_context(env.running(domain, qemu=qemu))
        yield domain
