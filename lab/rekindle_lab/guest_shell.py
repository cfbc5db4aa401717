"""Runs commands in guests: by ssh in a Debian guest, by a shell on a port of its own in the guest of a trial."""

import socket
import subprocess

from rekindle_lab import netns
from rekindle_lab.guests import Guest
from rekindle_lab.rekindle import RekindleError

DEADLINE_S = 900.0
SHELL_PORT = 7004
"""Port of the shell in `tests/images/stand-in`."""


def in_guest(guest: Guest, command: str) -> str:
    """Runs a command in a guest, and returns its output. Raises if it fails."""
    if guest.image.kind == "micro":
        return _by_shell(guest, command)
    result = subprocess.run(
        guest.ssh_command(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if result.returncode != 0:
        error = (result.stderr.strip() or result.stdout.strip())[-1000:]
        raise RekindleError(f"{guest.name}: {command[:80]}: exit status {result.returncode}: {error}")
    return result.stdout


def _by_shell(guest: Guest, command: str) -> str:
    with netns.connect(guest.netns, guest.address, SHELL_PORT, DEADLINE_S) as connection:
        connection.settimeout(DEADLINE_S)
        connection.sendall(command.encode())
        connection.shutdown(socket.SHUT_WR)
        reply = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    output, _, status = reply.rstrip("\n").rpartition("exit ")
    if status != "0":
        raise RekindleError(f"{guest.name}: {command[:80]}: exit status {status}: {output[-1000:]}")
    return output
