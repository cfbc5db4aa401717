"""A small client of QMP, QEMU's control protocol: JSON lines on a unix socket.

Commands are executed one after the other; events, which QEMU sends at any time, are kept with QEMU's own time stamps
(microseconds of the host's clock).
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class QmpError(Exception):
    """A command was rejected, or QEMU does not answer. The text names the socket and the command."""


@dataclass(frozen=True)
class Event:
    """An event as QEMU sent it. `host_us`: microseconds since 1970 by the host's clock."""

    name: str
    data: dict[str, Any]
    host_us: int


class Qmp:
    """One connection to one QEMU. Keeps events that arrive during a command until they are read."""

    def __init__(self, path: Path, timeout: float = 60.0, alive: Callable[[], bool] = lambda: True) -> None:
        """Connects to `path`; waits at most `timeout` seconds (for a reply, too), only while `alive` returns true."""
        self.path = path
        self.timeout = timeout
        self._events: list[Event] = []
        self._buffer = b""
        deadline = time.monotonic() + timeout
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(str(path))
                break
            except OSError as error:
                self._socket.close()
                if not alive():
                    raise QmpError(f"{path}: QEMU ended before it opened its QMP socket") from error
                if time.monotonic() > deadline:
                    raise QmpError(f"{path}: no QMP socket within {timeout:g} s") from error
                time.sleep(0.002)
        try:
            self._read_message(deadline)
            self.execute("qmp_capabilities")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. QEMU continues."""
        self._socket.close()

    def execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Runs a command and returns its result. Raises `QmpError` if QEMU rejects it."""
        request = {"execute": command, "arguments": arguments or {}}
        deadline = time.monotonic() + self.timeout
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise QmpError(f"{self.path}: {command}: {error}") from error
        while True:
            message = self._read_message(deadline)
            if "event" in message:
                self._keep_event(message)
            elif "error" in message:
                raise QmpError(f"{self.path}: {command}: {message['error'].get('desc', message['error'])}")
            else:
                return message.get("return")

    def wait_event(self, name: str, timeout: float | None = None) -> Event:
        """Returns the first event called `name`, after at most `timeout` seconds. Drops earlier events."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            while self._events:
                event = self._events.pop(0)
                if event.name == name:
                    return event
            message = self._read_message(deadline, what=f"event {name}")
            if "event" in message:
                self._keep_event(message)

    def forget_events(self) -> None:
        """Drops the events that have arrived so far."""
        self._events.clear()

    def _keep_event(self, message: dict[str, Any]) -> None:
        stamp = message["timestamp"]
        host_us = stamp["seconds"] * 1_000_000 + stamp["microseconds"]
        self._events.append(Event(message["event"], message.get("data", {}), host_us))

    def _read_message(self, deadline: float, what: str = "reply") -> dict[str, Any]:
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise QmpError(f"{self.path}: no {what} in time")
            self._socket.settimeout(seconds_left)
            try:
                data = self._socket.recv(65536)
            except TimeoutError as error:
                raise QmpError(f"{self.path}: no {what} in time") from error
            except OSError as error:
                raise QmpError(f"{self.path}: {error}") from error
            if not data:
                raise QmpError(f"{self.path}: QEMU closed the connection")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)
