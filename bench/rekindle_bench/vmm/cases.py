"""The cases of VMM reboots, listed in `CASES` at the end.

Each sets up its guests, replaces their QEMU in each way by turns (A B A B), and appends rows; the analysis judges them.
A *twin* is a second guest with the same hardware, which the peer (`cpr-transfer`) reboots (`twins.py`).
"""

import functools
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack

from rekindle_bench.case import NoRoomError
from rekindle_lab import netns
from rekindle_lab.guests import Guest, size
from rekindle_lab.rekindle import failed_requests

from .plan import Plan
from .rows import HOWS, Row
from .twins import LOAD, USUAL, Client, Peer, VmmEnvironment, by_name

SMALL_MIB = 256
DEBIAN_MIB = 1024
ECHO_PORT = 7
SESSION_DEADLINE_S = 10.0
"""A session that has not sent a line back after this time counts as lost."""
SLOW = Client(every="10ms")
"""Client of the case with many guests: sends few requests, so that the clients are not what is measured."""
SESSIONS = 4
"""Number of open TCP sessions that must survive the reboots, in addition to the ssh session."""


def in_turn(
    env: VmmEnvironment,
    case: str,
    ours: list[Guest],
    peers: list[Peer],
    repetitions: dict[str, int],
    client: Client = USUAL,
    each_round: Callable[[int], None] | None = None,
) -> None:
    """Reboots warm, cpr-transfer, saved and cold in turn, repeatedly, until no way has repetitions left.

    `each_round` is called at the start of each round.
    """
    names = f"{len(ours)} x {ours[0].image.kind} {size(ours[0].memory_mib)}"
    for round_number in range(max(repetitions.values())):
        todo = [how for how in HOWS if round_number < repetitions.get(how, 0) and (peers or how != "cpr-transfer")]
        env.log(f"{case}: {names}: round {round_number + 1} of {max(repetitions.values())}: {', '.join(todo)}")
        if each_round is not None:
            each_round(round_number)
        for how in todo:
            env.reboot(case, round_number, peers if how == "cpr-transfer" else ours, how, client=client)


def ram(env: VmmEnvironment, plan: Plan) -> None:
    """Measures figure 5: one micro guest, all of whose RAM is touched, by size."""
    for index, (mib, repetitions) in enumerate(plan.ways_by_mib.items(), start=1):
        with ExitStack() as stack:
            try:
                saved = repetitions.get("saved", 0)
                env.need(memory_mib=mib, disk_mib=mib if saved else 0)
                env.log(f"ram: starting a guest with {size(mib)}, and touching all of it")
                guest = stack.enter_context(env.ours(env.guest(f"ram{mib}", "micro", mib, index, "all")))
            except NoRoomError as error:
                env.left_out.append(f"micro with {size(mib)}: all of it, for the machine {error}")
                continue
            peers = []
            if repetitions.get("cpr-transfer", 0):
                try:
                    env.need(memory_mib=mib)
                    peers = [stack.enter_context(env.peer(guest))]
                except NoRoomError as error:
                    env.left_out.append(f"micro with {size(mib)}: cpr-transfer, for the machine {error}")
            in_turn(env, "ram", [guest], peers, repetitions)


def sizes(env: VmmEnvironment, plan: Plan) -> None:
    """Reboots the smallest and the largest guest warm in turn, both running, to isolate the effect of size."""
    env.need(memory_mib=sum(plan.smallest_largest_mib))
    with ExitStack() as stack:
        guests = []
        for index, mib in enumerate(plan.smallest_largest_mib, start=10):
            env.log(f"sizes: starting a guest with {size(mib)}, and touching all of it")
            guests.append(stack.enter_context(env.ours(env.guest(f"size{mib}", "micro", mib, index, "all"))))
        for round_number in range(plan.size_rounds):
            env.log(f"sizes: round {round_number + 1} of {plan.size_rounds}")
            for guest in guests:
                env.reboot("sizes", round_number, [guest], "warm")


def count(env: VmmEnvironment, plan: Plan) -> None:
    """Measures figures 6 and 7: a growing number of small guests, rebooted in parallel."""
    with ExitStack() as stack:
        ours: list[Guest] = []
        peers: list[Peer] = []
        for vms, repetitions in plan.ways_by_vms.items():
            env.log(f"count: starting VMs up to number {vms}")
            with_peers = any(ways.get("cpr-transfer", 0) for later, ways in plan.ways_by_vms.items() if later >= vms)
            while len(ours) < vms:
                env.need(memory_mib=2 * SMALL_MIB)
                guest = env.guest(f"small{len(ours)}", "micro", SMALL_MIB, 20 + len(ours))
                ours.append(stack.enter_context(env.ours(guest, wait=False)))
                if with_peers:
                    peers.append(stack.enter_context(env.peer(guest, wait=False)))
            for guest in [*ours, *(peer.guest for peer in peers)]:
                guest.wait_ready()
            each_round = functools.partial(alone, env, ours[0]) if vms == max(plan.ways_by_vms) else None
            in_turn(env, "count", ours, peers, repetitions, SLOW, each_round)


def alone(env: VmmEnvironment, guest: Guest, round_number: int) -> None:
    """Reboots one of many running guests warm, for comparison with a reboot of all guests."""
    env.reboot("solo", round_number, [guest], "warm", client=SLOW)


def debian(env: VmmEnvironment, plan: Plan) -> None:
    """Reboots one guest with a whole Debian system, with nginx as its service."""
    if not any(plan.debian_ways.values()):
        return
    env.need(memory_mib=2 * DEBIAN_MIB, disk_mib=8 * 1024)
    with ExitStack() as stack:
        env.log("debian: starting")
        guest = stack.enter_context(env.ours(env.guest("debian", "debian", DEBIAN_MIB, 40)))
        peer = stack.enter_context(env.peer(guest))
        in_turn(env, "debian", [guest], [peer], plan.debian_ways)


class EchoSession:
    """A session over a connection whose other end sends back each line."""

    def __init__(self, send: Callable[[bytes], None], descriptor: int, close: Callable[[], None]) -> None:
        """`descriptor`: file descriptor from which the echoed lines are read."""
        self._send, self._descriptor, self.close = send, descriptor, close
        self._count = 0

    def works(self) -> bool:
        """Returns whether a line is sent back in time."""
        self._count += 1
        line = b"line %d\n" % self._count
        try:
            self._send(line)
            echoed = b""
            deadline = time.monotonic() + SESSION_DEADLINE_S
            while echoed != line and line.startswith(echoed):
                if not select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    return False
                data = os.read(self._descriptor, 65536)
                if not data:
                    return False
                echoed += data
        except OSError:
            return False
        return echoed == line


def tcp_session(guest: Guest) -> EchoSession:
    """Opens a session with the guest's echo service, as soon as the service listens."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            connection = netns.connect(guest.netns, guest.address, ECHO_PORT, 60.0)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    return EchoSession(connection.sendall, connection.fileno(), connection.close)


def ssh_session(guest: Guest) -> EchoSession:
    """Opens a session with `cat` in the guest over ssh, with the image's key for root."""
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes"]
    command = ["ip", "netns", "exec", guest.netns, "ssh", "-F", "none", "-i", str(guest.image.key), "-T"]
    command += [word for option in options for word in ("-o", option)]
    process = subprocess.Popen(
        [*command, f"root@{guest.address}", "exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None and process.stdout is not None

    def close() -> None:
        process.kill()
        process.wait()

    return EchoSession(process.stdin.write, process.stdout.fileno(), close)


def losses(env: VmmEnvironment, plan: Plan) -> None:
    """Reboots warm in a row, under HTTP load, with TCP and ssh sessions open during all reboots."""
    env.need(memory_mib=DEBIAN_MIB, disk_mib=4 * 1024)
    with ExitStack() as stack:
        env.log("losses: starting debian")
        guest = stack.enter_context(env.ours(env.guest("losses", "debian", DEBIAN_MIB, 41)))
        # In a trial micro replaces the guest; it has no ssh.
        openers = [tcp_session] * SESSIONS + ([] if guest.image.kind == "micro" else [ssh_session])
        sessions = [opener(guest) for opener in openers]
        stack.callback(lambda: [session.close() for session in sessions])
        if not all(session.works() for session in sessions):
            raise RuntimeError("a TCP or ssh session does not work even before the first reboot")
        common = {"guest": "debian", "memory_mib": DEBIAN_MIB, "vms": 1, "vm": guest.name}
        with env.rekindle.probes([(LOAD.url(guest), guest.netns)], *LOAD.options, every=LOAD.every) as probes:
            for round_number in range(plan.rounds_under_load):
                document = env.rekindle.reboot([guest.name], "warm")
                vm = by_name(document, [guest.name])[0]
                lost = [index for index, session in enumerate(sessions) if not session.works()]
                row = Row(case="losses", how="warm", round=round_number, **common)
                row.stopped_us, row.steps = vm["stopped_us"], vm["steps"]
                row.stop_host_us, row.resume_host_us = vm["stop_host_us"], vm["resume_host_us"]
                row.total_us = document["first_stop_to_last_resume_us"]
                row.sessions, row.sessions_lost = len(sessions), len(lost)
                env.rows.append(row)
                env.log(f"losses: reboot {round_number + 1} of {plan.rounds_under_load}, sessions lost: {len(lost)}")
                for index in lost:  # reopened, or the session would be counted again after the next reboot
                    sessions[index].close()
                    sessions[index] = openers[index](guest)
        report = probes[0].report
        env.rows.append(
            Row(
                case="load",
                how="warm",
                round=0,
                gap_us=report["longest_gap_us"],
                answered=report["answered"],
                failed=failed_requests(report),
                connections_lost=report["connections_lost"],
                **common,
            )
        )


def memory(env: VmmEnvironment, plan: Plan) -> None:
    """Reboots warm; Rekindle compares every RAM block before and after, and the guest verifies its memory."""
    env.need(memory_mib=512)
    with env.ours(env.guest("memory", "micro", 512, 42, "all")) as guest:
        for round_number in range(plan.compared_rounds):
            env.log(f"memory: reboot {round_number + 1} of {plan.compared_rounds}")
            env.reboot("memory", round_number, [guest], "warm", "--verify-memory")
        reply = guest.command("verify")
        if not reply.startswith("ok"):
            raise RuntimeError(f"the guest finds its memory changed after {plan.compared_rounds} warm reboots: {reply}")


def breakdown(env: VmmEnvironment, plan: Plan) -> None:
    """Measures figure 8: throughput of nginx over time, with the steps of each way to reboot."""
    env.need(memory_mib=2 * DEBIAN_MIB, disk_mib=8 * 1024)
    with ExitStack() as stack:
        env.log("breakdown: starting debian")
        guest = stack.enter_context(env.ours(env.guest("web", "debian", DEBIAN_MIB, 43)))
        peer = stack.enter_context(env.peer(guest)) if "cpr-transfer" in plan.ways_over_time else None
        for how in plan.ways_over_time:
            env.log(f"breakdown: {how}")
            target: Guest | Peer = peer if peer is not None and how == "cpr-transfer" else guest
            env.records.append(env.reboot("breakdown", 0, [target], how, client=LOAD))


CASES: dict[str, Callable[[VmmEnvironment, Plan], None]] = {
    "ram": ram,
    "sizes": sizes,
    "losses": losses,
    "memory": memory,
    "count": count,
    "breakdown": breakdown,
    "debian": debian,
}
