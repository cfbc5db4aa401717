"""Case `losses`: what clients of a domain lose while its QEMU is replaced again and again, by other versions too.

Clients of three kinds work all the time: HTTP requests, one after the other; a TCP connection; and an ssh session. The
latter two send a line every 20 ms, and expect it back. Such a session is lost if its connection ends, or if a line does
not come back within a minute.
"""

import itertools
import os
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rekindle_lab import netns
from rekindle_lab.guests import READY_DEADLINE_S
from rekindle_lab.rekindle import failed_requests

from .domains import ECHO_PORT, LOAD_MB, QEMU_VARIABLES, LibvirtEnvironment, loaded, replaced
from .plan import Plan
from .private_libvirt import reachable
from .rows import AGAIN, FIRST, Row
from .serving import ServingDomain, served

IMAGE = "debian"
MACHINE = "pc-q35-7.2"
"""A machine type that all three versions of QEMU have."""
LINE_EVERY_S = 0.02
LINE_DEADLINE_S = 60.0
HTTP = ("--timeout", "60s")
HTTP_EVERY = "5ms"


class EchoClient:
    """A connection over which lines are sent and come back, in a thread of its own."""

    def __init__(self, what: str, send: int, receive: int) -> None:
        """`send` and `receive` are descriptors of the connection."""
        self.what, self.lines, self.failure = what, 0, ""
        self._send, self._receive = send, receive
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(LINE_EVERY_S):
                line = b"%d\n" % self.lines
                os.write(self._send, line)
                self._expect(line)
                self.lines += 1
        except OSError as error:
            self.failure = f"{self.what}: line {self.lines}: {error}"

    def _expect(self, line: bytes) -> None:
        received, end = b"", time.monotonic() + LINE_DEADLINE_S
        while received != line:
            if not select.select([self._receive], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"it does not come back within {LINE_DEADLINE_S:g} s")
            data = os.read(self._receive, 4096)
            if not data:
                raise ConnectionError("the connection has ended")
            received += data
            if not line.startswith(received):
                raise ConnectionError(f"{received!r} comes back instead of {line!r}")

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()


@contextmanager
def tcp_session(domain: ServingDomain) -> Iterator[EchoClient]:
    """Opens a connection to the guest's echo service."""
    with (
        netns.connect(domain.netns, domain.address, ECHO_PORT, READY_DEADLINE_S) as connection,
        closing(EchoClient("TCP", connection.fileno(), connection.fileno())) as session,
    ):
        yield session


@contextmanager
def ssh_session(domain: ServingDomain) -> Iterator[EchoClient]:
    """Opens an ssh session in which `cat` runs."""
    process = subprocess.Popen(
        domain.ssh_command("cat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with closing(EchoClient("ssh", process.stdin.fileno(), process.stdout.fileno())) as session:
            yield session
    finally:
        process.kill()
        process.communicate()


def losses(env: LibvirtEnvironment, plan: Plan) -> None:
    """Replaces the QEMU of one domain again and again, with clients at it; appends a row for each replacement."""
    env.need(memory_mib=3 * plan.losses_mib, disk_mib=4096)
    versions = [reachable(Path(os.environ[name])) for name in QEMU_VARIABLES]
    # To the next version, and at the end back to the first one.
    targets = itertools.islice(itertools.cycle([*versions[1:], versions[0]]), plan.losses)
    env.log("losses: starting a domain")
    with (
        served(env, "losses", 31, image=IMAGE, mib=plan.losses_mib, qemu=str(versions[0]), machine=MACHINE) as domain,
        ExitStack() as stack,
    ):
        sessions = [stack.enter_context(tcp_session(domain))]
        if not domain.stands_in:
            sessions.append(stack.enter_context(ssh_session(domain)))
        for session in sessions:
            _wait_line(session, 0)
        stack.enter_context(loaded(domain))
        for number, target in enumerate(targets):
            env.log(f"losses: {number + 1} of {plan.losses}: {target}")
            env.rows.append(_replacement(env, domain, target, number, sessions))


def _replacement(
    env: LibvirtEnvironment, domain: ServingDomain, target: Path, number: int, sessions: Sequence[EchoClient]
) -> Row:
    how = AGAIN if number else FIRST
    row = Row(case="losses", how=how, memory_mib=domain.memory_mib, guests=1, round=number, vm=domain.name)
    row.load_mb = LOAD_MB
    with env.rekindle.probes([(domain.web_url, domain.netns)], *HTTP, every=HTTP_EVERY) as [probe]:
        document = env.domains.call("replace-qemu", "--qemu", str(target), domain.name)
        for session in sessions:
            _wait_line(session, session.lines)
    replaced(row, document)
    row.answered, row.failed = probe.report["answered"], failed_requests(probe.report)
    row.sessions, row.lost_sessions = len(sessions), sum(bool(session.failure) for session in sessions)
    row.failure = "; ".join(session.failure for session in sessions if session.failure)
    return row


def _wait_line(session: EchoClient, line: int) -> None:
    """Waits until a line with a higher number than `line` has come back, or the session is lost."""
    end = time.monotonic() + 2 * LINE_DEADLINE_S
    while session.lines <= line and not session.failure:
        if time.monotonic() > end:
            raise TimeoutError(f"{session.what}: neither a line nor an error")
        time.sleep(LINE_EVERY_S)
