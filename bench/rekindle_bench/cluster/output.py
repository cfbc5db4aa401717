"""The cost of output commit: round trips to a guest, and answers per second, by turns with and without it.

Two loads are measured one after the other. For round trips few connections send requests at random moments; for answers
per second many connections send their next request as soon as the previous one is answered.
"""

import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from os import getpid

from rekindle_lab import netns
from rekindle_lab.guests import COMMAND_PORT, Guest
from rekindle_lab.protector import Protector
from rekindle_lab.stats import median, p99
from rekindle_lab.stores import Store, in_object_store

from .beds import GUEST_BYTES, BedEnvironment
from .plan import Plan
from .rows import Row

WAYS = ("none", "protect", "output-commit")
"""`none`: no checkpoints. `protect`: checkpoints alone. `output-commit`: network output is held until a checkpoint is
committed."""
ROUND_TRIP_CONNECTIONS = 16
"""Connections that measure round trips. Each pauses randomly between requests, so that requests come at any moment."""
LONGEST_PAUSE_S = 0.4
"""Longest such pause in s."""
RATE_CONNECTIONS = 64
"""Connections that measure answers per second."""
DEADLINE_S = 30.0
"""Timeout of one answer in s."""
REQUEST = b"tick\n"
"""Command to the guest, which answers with one line."""


def _connect(guest: Guest) -> socket.socket:
    connection = netns.connect(guest.netns, guest.address, COMMAND_PORT, DEADLINE_S)
    connection.settimeout(DEADLINE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive_answer(connection: socket.socket) -> None:
    reply = b""
    while not reply.endswith(b"\n"):
        part = connection.recv(256)
        if not part:
            raise ConnectionError("the guest has closed the connection")
        reply += part


def measure_round_trips(connections: list[socket.socket], seconds: float, seed: int) -> list[float]:
    """Returns round trips in us, of requests at random moments. Waits for requests that are under way at the end."""
    round_trips_us: list[float] = []
    errors: list[OSError] = []
    end = time.monotonic() + seconds

    def send_requests(connection: socket.socket, chance: random.Random) -> None:
        try:
            while True:
                time.sleep(chance.uniform(0.0, LONGEST_PAUSE_S))
                sent = time.monotonic()
                if sent > end:
                    return
                connection.sendall(REQUEST)
                _receive_answer(connection)
                round_trips_us.append((time.monotonic() - sent) * 1e6)
        except OSError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=send_requests, args=(connection, random.Random(seed * 1000 + index)))
        for index, connection in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return round_trips_us


def measure_answers_per_s(connections: list[socket.socket], seconds: float) -> float:
    """Returns answers per second; each connection sends its next request as soon as the previous one is answered."""
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
            connection.sendall(REQUEST)
        answered, began = 0, time.monotonic()
        while (remaining_s := began + seconds - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                _receive_answer(connection)
                answered += 1
                connection.sendall(REQUEST)
    duration_s = time.monotonic() - began
    for connection in connections:  # each still has a request under way
        _receive_answer(connection)
    return answered / duration_s


def ways_of_round(plan: Plan, round_number: int) -> list[tuple[str, float | None]]:
    """Returns the ways of one round with their intervals in s; every other round has the reverse order."""
    ways: list[tuple[str, float | None]] = [("none", None)]
    ways += [(how, every_s) for every_s in plan.output_intervals_s for how in WAYS[1:]]
    return ways if round_number % 2 == 0 else ways[::-1]


@contextmanager
def _protected(env: BedEnvironment, guest: Guest, store: Store, how: str, every_s: float | None) -> Iterator[None]:
    """Protects the guest with checkpoints, unless `how` is `none`."""
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
    """Measures a guest outside of the cluster, with its store in an object store."""
    env.stop_bed()
    programs = env.rekindle.binary.parent / "examples"
    with netns.namespace(f"rkb{getpid()}o") as name, in_object_store(programs, env.work) as bucket:
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
        store = bucket.fresh(guest.name)
        with env.ours(guest):
            _warm_up(guest, plan.throughput_window_s)
            for round_number in range(plan.output_rounds):
                for how, every_s in ways_of_round(plan, round_number):
                    env.log(f"output: turn {round_number + 1} of {plan.output_rounds}: {how} {every_s or ''}")
                    _measure_way(env, guest, store, how, every_s, round_number, plan)


@contextmanager
def _connections(guest: Guest) -> Iterator[list[socket.socket]]:
    """Opens the connections to a guest; closes them at the end."""
    with ExitStack() as opened:
        yield [opened.enter_context(_connect(guest)) for _ in range(RATE_CONNECTIONS)]


def _warm_up(guest: Guest, seconds: float) -> None:
    """Sends requests before the first window: an emulated processor is slow until its code has been translated."""
    with _connections(guest) as connections:
        measure_answers_per_s(connections, seconds)


def _measure_way(
    env: BedEnvironment, guest: Guest, store: Store, how: str, every_s: float | None, round_number: int, plan: Plan
) -> None:
    """Appends a row with the round trips and the answers per second of one way."""
    row = Row(
        case="output",
        round=round_number,
        kind=how,
        seed=round_number,
        node="",
        lasted_s=plan.round_trip_window_s,
        at_us=time.time_ns() // 1000,
        planned=plan.output_rounds,
        every_s=every_s,
        guest_bytes=GUEST_BYTES,
    )
    # Connects before output is held: otherwise each connection would wait for a checkpoint of its own.
    with _connections(guest) as connections, _protected(env, guest, store, how, every_s):
        callers = connections[:ROUND_TRIP_CONNECTIONS]
        round_trips_us = measure_round_trips(callers, plan.round_trip_window_s, round_number)
        row.trips, row.median_us, row.p99_us = len(round_trips_us), median(round_trips_us), p99(round_trips_us)
        row.per_s = measure_answers_per_s(connections, plan.throughput_window_s)
        row.recovered = True
    env.rows.append(row)
