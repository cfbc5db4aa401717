"""Network namespaces and taps for guests and their clients. Needs root and iproute2."""

import ctypes
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rekindle_lab.slow import run

T = TypeVar("T")

# From Linux's headers sched.h and if_tun.h, since Python has no names for them.
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000


def add(name: str) -> None:
    """Makes the network namespace `name`, with loopback up."""
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")


@contextmanager
def namespace(name: str) -> Iterator[str]:
    """Makes the network namespace `name`, with loopback up; removes it at the end with the taps in it."""
    add(name)
    try:
        yield name
    finally:
        run("ip", "netns", "del", name)


class Tap:
    """A tap with virtio-net headers in a network namespace. The tap exists for as long as `fd` or a copy is open."""

    def __init__(self, ifname: str, netns: str, address: str) -> None:
        """Makes the tap with the host's own `address` ("10.0.0.1/24"). The descriptor is inheritable."""
        self.ifname = ifname
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
            fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH22x", ifname.encode(), flags))  # struct ifreq
            os.set_inheritable(self.fd, True)
            run("ip", "link", "set", ifname, "netns", netns)
            run("ip", "-n", netns, "address", "add", address, "dev", ifname)
            run("ip", "-n", netns, "link", "set", ifname, "up")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the descriptor; the interface is removed with the descriptor's last copy."""
        os.close(self.fd)


def inside(netns: str, function: Callable[[], T]) -> T:
    """Runs `function` in a network namespace, and returns its result.

    A namespace belongs to a thread, so that a separate one enters it and the caller stays in its own.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def enter_and_call() -> None:
        try:
            with Path("/run/netns", netns).open("rb") as handle:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    number = ctypes.get_errno()
                    raise OSError(number, f"setns to {netns}: {os.strerror(number)}")
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=enter_and_call)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def connect(netns: str, address: str, port: int, timeout: float, interval: float = 0.1) -> socket.socket:
    """Makes a TCP connection in `netns`; tries every `interval` seconds, for at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return inside(netns, lambda: socket.create_connection((address, port), timeout=2.0))
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{address}:{port} does not answer within {timeout:g} s: {error}") from error
            time.sleep(interval)
