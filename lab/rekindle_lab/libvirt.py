"""Runs a private libvirtd for an experiment (`daemon`), as another user, with all of its directories in one folder.

`tap` makes a guest's network interface, `create` starts a guest by libvirt, and `Domain` accesses the guest.
"""

import pwd
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.guests import COMMAND_PORT, KERNEL_WORDS, Image, copy_sparse
from rekindle_lab.slow import run

USER = "nobody"
"""The user of the daemon and its guests."""
START_DEADLINE_S = 60.0
TUN = Path("/dev/net/tun")
# Environment variables by which libvirtd finds its directories, with their names in its folder.
_DIRECTORIES = {
    "HOME": "home",
    "XDG_RUNTIME_DIR": "run",
    "XDG_CONFIG_HOME": "config",
    "XDG_CACHE_HOME": "cache",
    "XDG_DATA_HOME": "data",
}


@dataclass
class Libvirt:
    """A running libvirtd."""

    folder: Path
    _daemon: subprocess.Popen[bytes]

    @property
    def uri(self) -> str:
        """The argument of `virsh --connect`."""
        return f"qemu:///session?socket={self.folder / 'run' / 'libvirt' / 'libvirt-sock'}"

    def virsh(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs virsh."""
        command = ["virsh", "--quiet", "--connect", self.uri, *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if check and completed.returncode != 0:
            raise OSError(f"virsh {' '.join(arguments)}: {completed.stderr.strip()}")
        return completed

    def kill(self) -> None:
        """Kills the daemon. The daemon's guests continue to run, as libvirt's do."""
        self._daemon.kill()
        self._daemon.wait()

    def owned(self, source: Path, name: str) -> Path:
        """Copies a file into the folder so that the daemon's user may read it."""
        copy = self.folder / name
        copy_sparse(source, copy)
        shutil.chown(copy, USER)
        return copy


@contextmanager
def daemon(folder: Path) -> Iterator[Libvirt]:
    """Runs a libvirtd while the body runs. Makes `folder`, which must be accessible to all users."""
    for name in ("", *_DIRECTORIES.values()):
        (folder / name).mkdir(mode=0o700)
        shutil.chown(folder / name, USER)
    account = pwd.getpwnam(USER)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["libvirtd", "--timeout", "3600", "--pid-file", str(folder / "libvirtd.pid")],
            cwd=folder,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                **{key: str(folder / name) for key, name in _DIRECTORIES.items()},
            },
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    libvirt = Libvirt(folder, process)
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while libvirt.virsh("uri", check=False).returncode != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"libvirtd does not answer: {(folder / 'log').read_text()[-1000:]}")
            time.sleep(0.1)
        yield libvirt
    finally:
        libvirt.kill()


@dataclass(frozen=True)
class Domain:
    """A debian-work guest that libvirt starts, with private RAM and a card on a tap, as virt-install defines it."""

    name: str
    memory_mib: int
    console: Path
    address: str
    """Address of the guest."""

    def command(self, line: str, deadline: float = 300.0, port: int = COMMAND_PORT) -> str:
        """Sends a line to one of the guest's ports and returns the reply."""
        end = time.monotonic() + deadline
        while True:
            try:
                with socket.create_connection((self.address, port), timeout=2.0) as connection:
                    connection.settimeout(deadline)
                    connection.sendall(line.encode() + b"\n")
                    return connection.makefile("rb").readline().decode().strip()
            except OSError as error:
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.name}: `{line}` was not answered within {deadline:g} s") from error
            time.sleep(0.1)


@contextmanager
def tap(name: str, address: str) -> Iterator[str]:
    """Makes a tap that the daemon's user may open, with this machine's own `address` ("10.0.0.1/24")."""
    run("ip", "tuntap", "add", "dev", name, "mode", "tap", "user", USER, "vnet_hdr")
    # With udev all users may open /dev/net/tun, but can use only their own taps. A machine without udev restricts it.
    mode = stat.S_IMODE(TUN.stat().st_mode)
    TUN.chmod(mode | 0o666)
    try:
        run("ip", "address", "add", address, "dev", name)
        run("ip", "link", "set", name, "up")
        yield name
    finally:
        TUN.chmod(mode)
        run("ip", "link", "del", name)


def create(libvirt: Libvirt, name: str, image: Image, memory_mib: int, qemu: str, card: str, address: str) -> Domain:
    """Starts a transient domain of type qemu. `card`: the guest's tap; `address`: the guest's address, with prefix."""
    files = {file: libvirt.owned(image.folder / file, file) for file in ("vmlinuz", "initrd", "disk.raw")}
    console = libvirt.folder / "console.log"
    append = f"{KERNEL_WORDS} root=/dev/vda ro rekindle.overlay=50% rekindle.tick=0 rekindle.ip={address}"
    xml = f"""
        <domain type='qemu'><name>{name}</name><memory unit='MiB'>{memory_mib}</memory><vcpu>1</vcpu>
        <os><type arch='x86_64' machine='q35'>hvm</type><kernel>{files["vmlinuz"]}</kernel>
        <initrd>{files["initrd"]}</initrd><cmdline>{append}</cmdline></os>
        <features><acpi/></features><cpu mode='maximum'/><devices><emulator>{qemu}</emulator>
        <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{files["disk.raw"]}'/>
        <target dev='vda' bus='virtio'/><readonly/></disk>
        <serial type='file'><source path='{console}'/></serial>
        <interface type='ethernet'><target dev='{card}' managed='no'/><model type='virtio'/></interface>
        <rng model='virtio'><backend model='random'>/dev/urandom</backend></rng></devices></domain>"""
    definition = libvirt.folder / "domain.xml"
    definition.write_text(xml)
    libvirt.virsh("create", str(definition))
    return Domain(name, memory_mib, console, address.split("/")[0])
