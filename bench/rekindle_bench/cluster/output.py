"""The cost of output commit: round trips to a guest, and answers per second, by turns with and without it."""

import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import getpid

from rekindle_lab import netns
from rekindle_lab.guests import COMMAND_PORT, Guest
from rekindle_lab.protector import Protector
from rekindle_lab.stats import median, p99
from rekindle_lab.stores import Store, over_tls

from .beds import GUEST_BYTES, BedEnvironment
from .plan import Plan
from .rows import Row

WAYS = ("none", "protect", "output-commit")
"""`none`: no checkpoints. `protect`: checkpoints alone. `output-commit`: network output is held until a checkpoint is
committed."""
CALLERS = 16
"""Connections that measure round trips. Each pauses randomly between requests, so that requests come at any moment."""
PAUSE_S = 0.4
"""Longest such pause in s."""
MANY = 64
"""Connections that measure answers per second."""
DEADLINE_S = 30.0
"""Timeout of one answer in s."""
ASK = b"tick\n"


def _connect(guest: Guest) -> socket.socket:
    line = netns.connect(guest.netns, guest.address, COMMAND_PORT, DEADLINE_S)
    line.settimeout(DEADLINE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _receive_answer(line: socket.socket) -> None:
    reply = b""
    while not reply.endswith(b"\n"):
        part = line.recv(256)
        if not part:
            raise ConnectionError("the guest has closed the connection")
        reply += part


def trips(lines: list[socket.socket], seconds: float, seed: int) -> list[float]:
    """Returns round trips in us, of requests at random moments. Waits for requests that are under way at the end."""
    round_trips: list[float] = []
    failed: list[BaseException] = []
    end = time.monotonic() + seconds

    def caller(line: socket.socket, chance: random.Random) -> None:
        try:
            while True:
                time.sleep(chance.uniform(0.0, PAUSE_S))
                began = time.monotonic()
                if began > end:
                    return
                line.sendall(ASK)
                _receive_answer(line)
                round_trips.append((time.monotonic() - began) * 1e6)
        except OSError as error:
            failed.append(error)

    threads = [
        threading.Thread(target=caller, args=(line, random.Random(seed * 1000 + index)))
        for index, line in enumerate(lines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return round_trips


def rate(lines: list[socket.socket], seconds: float) -> float:
    """Returns answers per second; each connection sends its next request as soon as the previous one is answered."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            selector.register(line, selectors.EVENT_READ)
            line.sendall(ASK)
        answered, began = 0, time.monotonic()
        while (left_s := began + seconds - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                line = key.fileobj
                assert isinstance(line, socket.socket)
                _receive_answer(line)
                answered += 1
                line.sendall(ASK)
    took_s = time.monotonic() - began
    for line in lines:
        _receive_answer(line)
    return answered / took_s


def turns(plan: Plan, round_number: int) -> list[tuple[str, float | None]]:
    """Returns the ways of one round with their intervals in s; every other round has the reverse order."""
    ways: list[tuple[str, float | None]] = [("none", None)]
    ways += [(how, every_s) for every_s in plan.output_every_s for how in WAYS[1:]]
    return ways if round_number % 2 == 0 else ways[::-1]


@contextmanager
def _protected(env: BedEnvironment, guest: Guest, store: Store, how: str, every_s: float | None) -> Iterator[None]:
    if every_s is None:
        yield
        return
    options = ["--output-commit"] if how == "output-commit" else []
    protector = Protector(env.rekindle, guest.name, store, f"{round(every_s * 1000)}ms", None, *options)
    try:
        # The first checkpoint has all memory, and the second has what was written during the first.
        protector.wait("checkpoint", 3)
        yield
        protector.stop()
    finally:
        protector.kill()
        env.rekindle.call("release", guest.name)


def output(env: BedEnvironment, plan: Plan) -> None:
    """Measures a guest outside of the cluster, with its store over TLS."""
    env.stop_bed()
    with netns.namespace(f"rkb{getpid()}o") as name, over_tls(env.rekindle, env.disk_dir / "output") as tls_store:
        guest = Guest(
            "output",
            image=env.image("micro"),
            memory_mib=GUEST_BYTES >> 20,
            index=31,
            touch=None,
            netns=name,
            ram_dir=env.ram_dir,
            disk_dir=env.disk_dir,
        )
        store = tls_store.fresh(guest.name)
        with env.ours(guest):
            _warm(guest, plan.many_s)
            for round_number in range(plan.output_rounds):
                for how, every_s in turns(plan, round_number):
                    env.log(f"output: turn {round_number + 1} of {plan.output_rounds}: {how} {every_s or ''}")
                    _window(env, guest, store, how, every_s, round_number, plan)


def _warm(guest: Guest, seconds: float) -> None:
    """Sends requests before the first window: an emulated processor is slow until its code has been translated."""
    lines = [_connect(guest) for _ in range(MANY)]
    rate(lines, seconds)
    for line in lines:
        line.close()


def _window(
    env: BedEnvironment, guest: Guest, store: Store, how: str, every_s: float | None, round_number: int, plan: Plan
) -> None:
    began_us, planned = time.time_ns() // 1000, plan.output_rounds
    row = Row(
        case="output",
        round=round_number,
        kind=how,
        seed=round_number,
        node="",
        lasted_s=plan.trips_s,
        at_us=began_us,
        planned=planned,
        every_s=every_s,
    )
    lines: list[socket.socket] = []
    try:
        # Connects before output is held: otherwise each connection would wait for a checkpoint of its own.
        lines += [_connect(guest) for _ in range(MANY)]
        with _protected(env, guest, store, how, every_s):
            round_trips = trips(lines[:CALLERS], plan.trips_s, round_number)
            row.trips, row.median_us, row.p99_us = len(round_trips), median(round_trips), p99(round_trips)
            row.per_s = rate(lines, plan.many_s)
            row.recovered = True
    finally:
        for line in lines:
            line.close()
    row.guest_bytes = GUEST_BYTES
    env.rows.append(row)
