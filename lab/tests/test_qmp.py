"""The client of QMP, QEMU's control protocol: JSON lines on a unix socket. Here a thread answers in place of QEMU."""

import json
import socket
import threading

import pytest

from rekindle_lab.qmp import Qmp, QmpError


class FakeQemu:
    """Answers QMP on a unix socket with the given replies."""

    def __init__(self, path, *replies):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.replies = list(replies)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        connection, _ = self.listener.accept()
        with connection, connection.makefile("rw") as stream:
            stream.write('{"QMP": {}}\n')
            stream.flush()
            for reply in ['{"return": {}}', *self.replies]:
                stream.readline()
                stream.write(reply + "\n")
                stream.flush()


STOPPED_S, STOPPED_US = 12, 34
STOP_EVENT = json.dumps({"event": "STOP", "timestamp": {"seconds": STOPPED_S, "microseconds": STOPPED_US}})
"""As QEMU sends it when the guest stops."""


def test_events_keep_qemus_own_time(tmp_path):
    """The time is QEMU's time stamp in microseconds, not the time at which the event was read."""
    reply = '{"return": {"status": "paused"}}'
    FakeQemu(tmp_path / "s", f"{STOP_EVENT}\n{reply}")  # the event arrives before the reply
    with Qmp(tmp_path / "s", 5) as qmp:
        assert qmp.execute("query-status") == {"status": "paused"}
        event = qmp.wait_event("STOP", 1)
        assert (event.name, event.host_us) == ("STOP", STOPPED_S * 1_000_000 + STOPPED_US)


def test_an_error_names_command_and_reason(tmp_path):
    FakeQemu(tmp_path / "s", '{"error": {"class": "GenericError", "desc": "no such thing"}}')
    with Qmp(tmp_path / "s", 5) as qmp, pytest.raises(QmpError, match="migrate: no such thing"):
        qmp.execute("migrate")


def test_a_connection_that_qemu_closes_is_an_error(tmp_path):
    FakeQemu(tmp_path / "s")
    with Qmp(tmp_path / "s", 5) as qmp, pytest.raises(QmpError):
        qmp.wait_event("RESUME", 5)


def test_a_qemu_that_ends_before_it_listens_is_an_error(tmp_path):
    with pytest.raises(QmpError, match="ended"):
        Qmp(tmp_path / "none", 5, alive=lambda: False)


def test_a_qemu_that_does_not_listen_in_time_is_an_error(tmp_path):
    with pytest.raises(QmpError, match="no QMP socket within"):
        Qmp(tmp_path / "none", 0.05)
