"""Where checkpoints go: a folder of the machine's disk, a slow disk, a server over TLS."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle_lab.rekindle import Rekindle, RekindleError

SLOW_BYTES_PER_S = 90_000_000
SLOW_OPERATIONS_PER_S = 120
"""The paper's hard drive."""
START_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Store:
    """One store, or the place for some (`within`)."""

    kind: str
    """`disk`, `slow`, `tls`."""
    url: str
    folder: Path
    """Where it is on this machine."""
    options: tuple[str, ...] = ()
    """What a command needs besides its URL."""

    def within(self, name: str) -> "Store":
        """The store called `name` at this place."""
        return replace(self, url=f"{self.url}/{name}", folder=self.folder / name)

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self) -> None:
        """Let the machine drop what it has cached of its files, so that the next reader reads the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                forget(path)


def forget(path: Path) -> None:
    """Let the machine drop what it has cached of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def on_disk(folder: Path) -> Store:
    """A folder of the machine's disk."""
    folder.mkdir(parents=True, exist_ok=True)
    return Store("disk", str(folder), folder)


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-1000:]
        raise OSError(f"{' '.join(str(word) for word in command)}: exit status {done.returncode}: {said}")
    return done.stdout.strip()


@contextmanager
def on_slow_disk(folder: Path, size_mib: int = 6144) -> Iterator[Store]:
    """A disk of 90 MB/s and 120 operations a second, with ext4 on it; `folder` is on the machine's disk.

    QEMU's storage daemon holds it to that, and hands it to a loop device by FUSE. So it works with any kernel and any
    version of control groups, and the limits hold for everything, also for what the kernel writes back later.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image, device, mount, pid = (folder / name for name in ("disk.raw", "device", "mount", "daemon.pid"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with image.open("wb") as file:
            file.truncate(size_mib << 20)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", image)
        device.touch()
        mount.mkdir()
        limits = {"bps-total": SLOW_BYTES_PER_S, "iops-total": SLOW_OPERATIONS_PER_S}
        nodes = [
            {"driver": "file", "node-name": "image", "filename": str(image), "cache": {"direct": True}},
            {"driver": "throttle", "node-name": "slow", "throttle-group": "limits", "file": "image"},
        ]
        group = {"qom-type": "throttle-group", "id": "limits", "limits": limits}
        export = {"type": "fuse", "id": "out", "node-name": "slow", "mountpoint": str(device), "writable": True}
        command = ["qemu-storage-daemon", "--daemonize", "--pidfile", str(pid), "--object", json.dumps(group)]
        command += [word for node in nodes for word in ("--blockdev", json.dumps(node))]
        _run(*command, "--export", json.dumps(export))
        stack.callback(_end, pid, device)
        loop = _run("losetup", "--find", "--show", "--direct-io=on", device)
        stack.callback(subprocess.run, ["losetup", "--detach", loop], check=False)
        _run("mount", "-t", "ext4", loop, mount)
        stack.callback(subprocess.run, ["umount", str(mount)], check=False)
        yield Store("slow", str(mount), mount)


def _end(pid: Path, device: Path) -> None:
    """End the storage daemon, and wait until it has."""
    number = int(pid.read_text())
    os.kill(number, 15)
    deadline = time.monotonic() + START_DEADLINE_S
    while Path("/proc", str(number)).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    subprocess.run(["umount", "-l", str(device)], capture_output=True, check=False)


def certificates(folder: Path) -> None:
    """An authority, and what it has signed: `ca.pem`, `server.pem` and `client.pem`, with keys beside them (`.key`)."""
    folder.mkdir(parents=True, exist_ok=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    authority = folder / "ca.pem"
    named = ("-subj", "/CN=rekindle-bench", "-days", "2")
    _run("openssl", "req", "-x509", *curve, "-keyout", folder / "ca.key", "-out", authority, *named)
    for who in ("server", "client"):
        extensions = folder / f"{who}.ext"
        extensions.write_text(
            "basicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n"
            "extendedKeyUsage=serverAuth,clientAuth\n"
        )
        request = folder / f"{who}.csr"
        _run("openssl", "req", "-new", *curve, "-keyout", folder / f"{who}.key", "-out", request, *named[:2])
        signed = ("-CA", authority, "-CAkey", folder / "ca.key", "-CAcreateserial", "-days", "2")
        _run("openssl", "x509", "-req", "-in", request, *signed, "-extfile", extensions, "-out", folder / f"{who}.pem")


@contextmanager
def over_tls(rekindle: Rekindle, folder: Path) -> Iterator[Store]:
    """A server of ours on this machine's loopback, its stores on the machine's disk."""
    keys, at = folder / "keys", folder / "stores"
    certificates(keys)
    at.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(rekindle.binary), "store", "serve", "--listen", f"127.0.0.1:{port}", "--dir", str(at)]
    command += ["--cert", str(keys / "server.pem"), "--key", str(keys / "server.key")]
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--client-ca", str(keys / "ca.pem")],
            env=rekindle.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RekindleError(f"store serve: {log.read_text()[-1000:]}") from None
                time.sleep(0.02)
        client = ("--cert", str(keys / "client.pem"), "--key", str(keys / "client.key"), "--ca", str(keys / "ca.pem"))
        yield Store("tls", f"tls://127.0.0.1:{port}", at, client)
    finally:
        server.terminate()
        server.wait()
