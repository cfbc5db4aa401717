"""A libvirt of its own for a run: a real libvirtd and virtlogd of the system (`qemu:///system`) in a mount namespace.

Only libvirt's directories are private, at the usual paths: `/run`, `/etc/libvirt` and its directories below `/var`.
They are empty file systems in memory, except `SAVES`, which is on a real disk, as a host's is. So the host's libvirt is
neither seen nor changed. The network namespace is one of the run. Cgroups and process numbers are the host's: names of
domains must not be those of the host's domains, because libvirt names cgroups after them.

The namespace has no `/dev/kvm`. Where root may use it and libvirt's user may not, libvirt 9.0 takes what it has found
out about each QEMU binary for outdated whenever it starts, and queries all of them again.

A *keeper* process, which executes this file (`main`), makes the namespace and starts the daemons. It ends domains and
daemons when its standard input is closed, so also when the benchmark was killed. `PrivateLibvirt` runs commands in the
namespace.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle_lab.rekindle import Rekindle
from rekindle_lab.slow import run

URI = "qemu:///system"
PRIVATE = ("/run", "/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt")
"""Directories of which the namespace has its own."""
IMAGES = Path("/var/lib/libvirt/images")
"""Images that the user of libvirt's QEMUs can read."""
QEMUS = Path("/var/lib/libvirt/qemus")
"""Unpacked QEMUs, which are in a folder that the user of libvirt's QEMUs cannot enter."""
SAVES = Path("/var/lib/libvirt/qemu/save")
"""Where `virsh managedsave` writes a domain's RAM."""
STATUS = Path("/run/libvirt/qemu")
"""Where the daemon has the status file and the pid file of each running domain."""
CONFIGURATION = 'auth_unix_rw = "none"\nauth_unix_ro = "none"\n'
"""The daemon's: root may connect without polkit, which does not run in the namespace."""
# Their pid files are in /run, named after the programs. virtlogd must run before libvirtd, which needs it for logs.
DAEMONS = ("virtlogd", "libvirtd")
DEADLINE_S = 120.0
"""Deadline for a daemon to start or end: long, since the machine may be busy."""
POLL_S = 0.05
READY = "ready"


@dataclass(frozen=True)
class PrivateLibvirt:
    """A running private libvirt."""

    keeper: int
    """Process whose namespaces it has."""

    @property
    def enter(self) -> list[str]:
        """The words that run a command in the namespaces, before the command."""
        namespaces = f"/proc/{self.keeper}/ns"
        return ["nsenter", f"--mount={namespaces}/mnt", f"--net={namespaces}/net"]

    def virsh(self, *arguments: str) -> str:
        """Runs virsh and returns its output."""
        return run(*self.enter, "virsh", "--quiet", "--connect", URI, *arguments)

    def create(self, name: str, xml: str) -> None:
        """Defines a domain and starts it."""
        definition = Path(f"/proc/{self.keeper}/root/run/{name}.xml")
        definition.write_text(xml)
        self.virsh("define", f"/run/{name}.xml")
        self.virsh("start", name)

    def destroy(self, name: str) -> None:
        """Ends a domain if it runs, and removes its definition and its saved RAM."""
        if name in self.virsh("list", "--name").split():
            self.virsh("destroy", name)
        if name in self.virsh("list", "--all", "--name").split():
            self.virsh("undefine", name, "--managed-save")

    def seen_from_here(self, path: Path) -> Path:
        """Returns the path by which this process reaches a file of this libvirt."""
        return Path(f"/proc/{self.keeper}/root{path}")

    def rekindle(self, ours: Rekindle, folder: Path) -> Rekindle:
        """Returns Rekindle with its own run directory in `folder`, such that it finds this libvirt."""
        script = folder / "rekindle"
        script.write_text(f'#!/bin/sh\nexec {" ".join(self.enter)} {ours.binary} "$@"\n')
        script.chmod(0o755)
        return Rekindle(script, folder / "domains")

    @contextmanager
    def polled(self) -> Iterator["Polls"]:
        """Runs a client that connects to libvirt again and again while the body runs."""
        command = [*self.enter, sys.executable, "-P", str(Path(__file__).with_name("poll.py")), URI]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        polls = Polls()
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != READY:
                raise OSError(f"{' '.join(command)}: ended with status {process.wait()}")
            yield polls
            process.send_signal(signal.SIGINT)
            attempts = json.loads(process.communicate(timeout=DEADLINE_S)[0])
            polls.attempts = [Attempt(*attempt) for attempt in attempts]
        finally:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class Attempt:
    """An attempt of a client to connect to libvirt and to ask for the number of domains."""

    begin_host_us: int
    end_host_us: int
    answered: bool


@dataclass
class Polls:
    """The attempts of a client, known once it has been stopped."""

    attempts: Sequence[Attempt] = ()


def tree_of(qemu: Path) -> Path:
    """Returns the folder into which a QEMU is unpacked, which has it at `usr/bin`; `/` for an installed one."""
    return qemu.parents[2]


def reachable(qemu: Path) -> Path:
    """Returns the path at which domains reach a QEMU whose tree `started` was given."""
    tree = tree_of(qemu)
    return qemu if tree == Path("/") else QEMUS / tree.name / qemu.relative_to(tree)


@contextmanager
def started(netns: str, images: Sequence[Path], qemus: Sequence[Path], saves: Path) -> Iterator[PrivateLibvirt]:
    """Runs a private libvirt while the body runs, in the network namespace `netns`.

    Copies the files `images` into `IMAGES`, and makes unpacked `qemus` reachable. `saves`: folder on a real disk, made
    here, which domains see as `SAVES`.
    """
    missing = [program for program in ("virsh", *DAEMONS) if shutil.which(program) is None]
    if missing:
        raise OSError(f"no {', '.join(missing)} in PATH; install libvirt-daemon-system and libvirt-clients")
    saves.mkdir(parents=True)
    command = ["nsenter", f"--net=/run/netns/{netns}", "unshare", "--mount", "--propagation", "private"]
    trees = [tree for tree in map(tree_of, qemus) if tree != Path("/")]
    command += [sys.executable, "-P", __file__, str(saves), *map(str, [*images, *trees])]
    # A session of its own: an interrupt from the terminal must not end it before the benchmark has finished.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != READY:
            raise OSError(f"the private libvirt does not start: {' '.join(command)}")
        yield PrivateLibvirt(process.pid)
    finally:
        process.stdin.close()
        status = process.wait()
        process.stdout.close()
    if status != 0:
        raise OSError(f"the private libvirt has not ended its domains: exit status {status}")


def main(saves: Path, sources: Sequence[Path]) -> None:
    """Is the keeper: sets the namespace up, starts the daemons, and ends everything when standard input is closed.

    `sources`: files are images, folders are trees of QEMUs.
    """
    for directory in PRIVATE:
        Path(directory).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "mode=755,nosuid", "rekindle-bench", directory)
    _hide_kvm()
    Path("/etc/libvirt/libvirtd.conf").write_text(CONFIGURATION)
    IMAGES.mkdir()
    for source in sources:
        if source.is_dir():
            tree = QEMUS / source.name
            tree.mkdir(parents=True)
            run("mount", "--bind", source, tree)
        else:
            shutil.copy(source, IMAGES)
    SAVES.mkdir(parents=True)
    run("mount", "--bind", saves, SAVES)
    try:
        for daemon in DAEMONS:
            _start(daemon)
        _virsh("uri")
        print(READY, flush=True)
        sys.stdin.read()
    finally:
        _end()


def _hide_kvm() -> None:
    """Gives the namespace a `/dev` without `kvm`: the same devices, links and mounted file systems.

    libvirt makes a `/dev` for each QEMU, and moves there whatever is mounted below `/dev`, which fails for a single
    device and for mounts that are covered by others.
    """
    staging = Path("/run/dev")
    staging.mkdir()
    run("mount", "-t", "tmpfs", "-o", "mode=755,nosuid", "rekindle-bench", staging)
    _copy_devices(Path("/dev"), staging)
    for name in ("pts", "shm"):
        (staging / name).mkdir()
        run("mount", "--bind", Path("/dev") / name, staging / name)
    for mounted in ("pts", "shm", "mqueue", "hugepages", ""):
        subprocess.run(["umount", "--lazy", Path("/dev") / mounted], capture_output=True, check=False)
    run("mount", "--move", staging, "/dev")


def _copy_devices(source: Path, target: Path) -> None:
    """Copies devices and symbolic links, not files."""
    for path in source.iterdir():
        copy, mode = target / path.name, path.lstat().st_mode
        if stat.S_ISLNK(mode):
            copy.symlink_to(path.readlink())
        elif (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and path.name != "kvm":
            os.mknod(copy, mode, path.lstat().st_rdev)
            copy.chmod(stat.S_IMODE(mode))
        elif stat.S_ISDIR(mode) and path.name == "net":
            copy.mkdir()
            _copy_devices(path, copy)


def _start(daemon: str) -> None:
    """Starts a daemon, which goes to the background when it is ready."""
    command = [daemon, "-d"]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=DEADLINE_S)


def _virsh(*arguments: str) -> str:
    return run("virsh", "--quiet", "--connect", URI, *arguments)


def _end() -> None:
    """Ends all domains and the daemons. Raises if a QEMU was left that libvirt did not end."""
    qemus = [pid for path in STATUS.glob("*.xml") if (pid := _running(path.with_suffix(".pid")))]
    # Only the daemon removes what a domain has outside of the namespace: its cgroups.
    if not _running(Path("/run/libvirtd.pid")):
        _start("libvirtd")
    for name in _virsh("list", "--name").split():
        with suppress(OSError):
            _virsh("destroy", name)
    left = [pid for pid in qemus if _is_alive(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for daemon in reversed(DAEMONS):
        if pid := _running(Path(f"/run/{daemon}.pid")):
            os.kill(pid, signal.SIGTERM)
            _wait_ended(pid)
    if left:
        raise OSError(f"QEMUs that libvirt did not end: {left}")


def _is_alive(pid: int) -> bool:
    """Returns whether a process exists, and has not become a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_ended(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _is_alive(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise OSError(f"process {pid} does not end")
        time.sleep(POLL_S)


def _running(pid_file: Path) -> int | None:
    """Returns the running process that a pid file names. A daemon creates the file before it writes it."""
    try:
        pid = int(pid_file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return pid if _is_alive(pid) else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
