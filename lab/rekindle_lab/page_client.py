"""A client that requests a guest's web page repeatedly, over new connections, and records each answer's time.

The client opens new connections, because a boot kills the old ones, whose retransmissions would be seconds apart.
It uses many threads, because a connection to a guest that has just ended does not notice the next guest, and waits for
its answer for `ANSWER_TIMEOUT_S`.
"""

import itertools
import socket
import threading
import time
from dataclasses import dataclass

from rekindle_lab import netns
from rekindle_lab.rekindle import RekindleError

THREADS = 16
REQUEST_EVERY_S = 0.16
"""Seconds between two requests of one thread; all threads together make at most 100 requests per second."""
CONNECT_TIMEOUT_S = 0.1
"""Timeout of a connection attempt in seconds."""
ANSWER_TIMEOUT_S = 2.0
"""Timeout of the answer after a connection in seconds."""
WAIT_S = 300.0
"""Deadline for a number of answers."""


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    host_us: int
    """When the last byte of the answer arrived, by the host's clock."""
    took_us: int
    """Time since the connection was started."""


@dataclass(frozen=True)
class Gap:
    """The longest time without an answer."""

    start_host_us: int
    end_host_us: int
    first_us: int
    """Duration of the request whose answer ended the gap."""

    @property
    def us(self) -> int:
        """Length of the gap in microseconds."""
        return self.end_host_us - self.start_host_us


class PageClient:
    """Requests a page from `__enter__` until `__exit__`."""

    def __init__(self, namespace: str, address: str, path: str, port: int = 80) -> None:
        self.answers: list[Answer] = []
        self._namespace, self._address, self._port = namespace, address, port
        self._request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run_thread, args=[n], daemon=True) for n in range(THREADS)]

    def _run_thread(self, number: int) -> None:
        self._stopped.wait(number * REQUEST_EVERY_S / THREADS)
        netns.inside(self._namespace, self._ask_repeatedly)

    def _ask_repeatedly(self) -> None:
        while not self._stopped.is_set():
            begin_ns = time.monotonic_ns()
            if self.ask_once():
                took_us = (time.monotonic_ns() - begin_ns) // 1000
                self.answers.append(Answer(time.time_ns() // 1000, took_us))
            self._stopped.wait(max(0.0, REQUEST_EVERY_S - (time.monotonic_ns() - begin_ns) / 1e9))

    def ask_once(self) -> bool:
        """Returns whether one request is answered completely."""
        try:
            with socket.create_connection((self._address, self._port), CONNECT_TIMEOUT_S) as connection:
                connection.settimeout(ANSWER_TIMEOUT_S)
                connection.sendall(self._request)
                answer = b""
                while not _is_whole(answer):
                    data = connection.recv(65536)
                    if not data:
                        return False
                    answer += data
                return True
        except OSError:
            return False

    def wait(self, more: int, after_host_us: int = 0) -> None:
        """Waits until `more` answers have arrived after `after_host_us`."""
        deadline = time.monotonic() + WAIT_S
        while sum(answer.host_us > after_host_us for answer in self.answers) < more:
            if time.monotonic() > deadline:
                raise RekindleError(f"{self._address}: no {more} answers within {WAIT_S:g} s")
            time.sleep(0.02)

    def __enter__(self) -> "PageClient":
        """Starts the requests."""
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the requests."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def _is_whole(answer: bytes) -> bool:
    """Returns whether an answer is complete. Raises `OSError` unless it has status 200 and a length."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    lines = head.lower().split(b"\r\n")
    lengths = [line for line in lines if line.startswith(b"content-length:")]
    if b" 200 " not in lines[0] or not lengths:
        raise OSError(f"an unexpected answer: {lines[0]!r}")
    return len(body) >= int(lengths[0].split(b":")[1])


def longest_gap(answers: list[Answer], begin_host_us: int) -> Gap:
    """Returns the longest time between two answers of which the second arrived after `begin_host_us`."""
    ordered = sorted(answers, key=lambda answer: answer.host_us)
    gaps = [
        Gap(answer.host_us, following.host_us, first_us=following.took_us)
        for answer, following in itertools.pairwise(ordered)
        if following.host_us > begin_host_us
    ]
    if not gaps:
        raise RekindleError("the client has no answers around the reboot")
    return max(gaps, key=lambda gap: gap.us)
