"""A client of the micro guest's counter, which grows with each tick; shows how far a fail-over sets the counter back.

    python3 counter.py ADDRESS OUT [EVERY_MS [PATIENCE_S]]

Until it is ended, the client writes a JSON line for each answer: {"host_us", "tick"}.

Needs only Python itself. The client reconnects when an answer takes longer than `PATIENCE`, since a guest restored from
a checkpoint does not know connections made after that checkpoint.
"""

import json
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PORT = 7000
PATIENCE = 0.15
"""Timeout of an answer in seconds."""


@dataclass(frozen=True)
class Answer:
    """One answer: the counter, and the arrival in microseconds since 1970."""

    host_us: int
    tick: int


@dataclass(frozen=True)
class CounterDrop:
    """A decrease of the counter, or a silence: last answer before it, highest count so far, first answer after it."""

    before: Answer
    highest: int
    after: Answer

    @property
    def gap_s(self) -> float:
        """Seconds without an answer."""
        return (self.after.host_us - self.before.host_us) / 1e6

    @property
    def back(self) -> int:
        """Ticks that a client had received and that are lost."""
        return max(0, self.highest - self.after.tick)


def read(path: Path) -> list[Answer]:
    """Reads the answers in a file; ignores an incomplete last line."""
    lines = path.read_text().splitlines(keepends=True)
    return [Answer(**json.loads(line)) for line in lines if line.endswith("\n")]


def drops(answers: Iterable[Answer], silence_s: float = 0.5) -> Iterator[CounterDrop]:
    """Finds where the counter decreased, and where there was no answer for longer than `silence_s`.

    >>> list(drops([Answer(0, 5), Answer(100_000, 6), Answer(900_000, 4), Answer(1_000_000, 5)]))[0].back
    2
    """
    highest_tick, previous = 0, None  # the highest since the last drop
    for answer in answers:
        if previous is not None:
            drop = CounterDrop(previous, highest_tick, answer)
            if drop.back or drop.gap_s > silence_s:
                yield drop
                highest_tick = 0
        highest_tick, previous = max(highest_tick, answer.tick), answer


def _request_tick(connection: socket.socket) -> int:
    connection.sendall(b"tick\n")
    reply = b""
    while not reply.endswith(b"\n"):
        part = connection.recv(64)
        if not part:
            raise ConnectionError("closed")
        reply += part
    status, tick = reply.split()
    if status != b"ok":
        raise ConnectionError(f"unexpected answer {reply!r}")
    return int(tick)


def watch(address: str, out: Path, every_s: float, patience_s: float = PATIENCE) -> None:
    """Requests the counter repeatedly, and writes the answers."""
    connection: socket.socket | None = None
    with out.open("a", buffering=1) as file:
        while True:
            began = time.monotonic()
            try:
                if connection is None:
                    connection = socket.create_connection((address, PORT), patience_s)
                tick = _request_tick(connection)
                file.write(json.dumps({"host_us": time.time_ns() // 1000, "tick": tick}) + "\n")
            except (OSError, ValueError):
                if connection is not None:
                    connection.close()
                connection = None
            time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def main() -> None:
    """Runs the client with the arguments of the command line."""
    address, out, *options = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    every_ms = int(options[0]) if options else 20
    patience_s = float(options[1]) if len(options) > 1 else PATIENCE
    watch(address, Path(out), every_ms / 1000, patience_s)


if __name__ == "__main__":
    main()
