"""A client of a web server that requests one file after the other, also across a reboot (`Client`), and its `rates`.

It has one connection, and so shows how fast the guest serves files: from its disk, its page cache or a retained cache.
"""

import http.client
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rekindle_lab import netns
from rekindle_lab.rekindle import RekindleError

ANSWER_TIMEOUT_S = 1.0
"""Seconds without an answer after which the client sends its request again on a new connection."""
WAIT_S = 600.0
"""Deadline for a number of files."""


@dataclass(frozen=True)
class Answer:
    """One file that was received completely."""

    at: float
    """When the file was complete, by the monotonic clock."""
    took_s: float
    bytes: int


class Client:
    """Requests files from `__enter__` until `__exit__`; `answers` grows meanwhile.

    Requests all `paths` in a random order, repeatedly; the order is the same in every run.
    """

    def __init__(self, namespace: str, address: str, paths: Sequence[str]) -> None:
        self.answers: list[Answer] = []
        self._namespace, self._address, self._paths = namespace, address, paths
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._address, 80, timeout=ANSWER_TIMEOUT_S)
        target = (self._address, 80)
        connection.sock = netns.inside(self._namespace, lambda: socket.create_connection(target, ANSWER_TIMEOUT_S))
        return connection

    def _run(self) -> None:
        order = random.Random(1)  # a fixed seed: the same order in every run
        paths: list[str] = []
        while not self._stopped.is_set():
            try:
                connection = self._connect()
                while not self._stopped.is_set():
                    if not paths:
                        paths = order.sample(self._paths, len(self._paths))
                    begin = time.monotonic()
                    connection.request("GET", paths[-1])
                    answer = connection.getresponse()
                    size = len(answer.read())
                    now = time.monotonic()
                    if answer.status != 200:
                        raise OSError(f"status {answer.status}")
                    paths.pop()
                    self.answers.append(Answer(now, now - begin, size))
                connection.close()
            except (OSError, http.client.HTTPException):
                # The guest is being rebooted; the next request follows soon.
                self._stopped.wait(0.02)

    def wait(self, more: int) -> None:
        """Waits until `more` further files have arrived."""
        wanted, deadline = len(self.answers) + more, time.monotonic() + WAIT_S
        while len(self.answers) < wanted:
            if time.monotonic() > deadline:
                raise RekindleError(f"{self._address}: {len(self.answers)} of {wanted} files came in {WAIT_S:g} s")
            time.sleep(0.05)

    def __enter__(self) -> "Client":
        """Starts the requests."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the requests."""
        self._stopped.set()
        self._thread.join()


class SecondRate(NamedTuple):
    """What a client received in one second, and the time that these requests took, in us."""

    second: int
    requests: int
    bytes: int
    took_us: int


def rates(answers: list[Answer], begin: float, rebooted: float, well: float, end: float) -> list[SecondRate]:
    """Returns the rates of each second from `begin` to `end`. All times are by the monotonic clock, in seconds.

    Seconds before the reboot count from the reboot: the last one is -1. Seconds after it count from 1, from when all
    services of the guest answered again (`well`).
    """
    by_second: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        if begin <= answer.at <= min(rebooted, end):
            by_second[-1 - int(rebooted - answer.at)].append(answer)
        elif max(begin, well) <= answer.at <= end:
            by_second[1 + int(answer.at - well)].append(answer)
    seconds = range(-int(rebooted - begin), int(end - well) + 1)
    return [_rate(second, by_second[second]) for second in seconds if second != 0]


def _rate(second: int, answers: list[Answer]) -> SecondRate:
    took_s = sum(answer.took_s for answer in answers)
    return SecondRate(second, len(answers), sum(answer.bytes for answer in answers), round(took_s * 1e6))
