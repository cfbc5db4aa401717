"""Loads of a guest: the client wrk with our script, and caches that are dropped under load. No guest is started."""

import re
import subprocess

import pytest
from waiting import wait_until

from rekindle_lab.experiment import load
from rekindle_lab.experiment.runner import RunError

# The text of wrk, with an incomplete line at its end, and the JSON that our script wrk.lua prints as the last line.
WRK_TEXT = """Running 3s test @ http://10.88.1.2/
  50 requests in 3.00s, 1.20MB read
Non-2xx or 3xx responses: 2
{"requests": 50, "duration_us": 3000000, "bytes": 1200000,
"""
RESULT_LINE = (
    '{"requests": 50, "duration_us": 2000000, "bytes": 9, "failed": {"connect": 0, "read": 1, "write": 0, '
    '"status": 2, "timeout": 3}, "latency": {"mean_us": 30, "p50_us": 25000}}'
)


def test_wrks_output_is_parsed():
    """48 of 50 requests had a good status, in 2 s; 1 + 2 + 3 requests failed."""
    window = load.parse_wrk(WRK_TEXT + RESULT_LINE + "\n")
    assert (window.throughput_per_s, window.response_time_ms, window.failed) == (24.0, 25.0, 6)
    assert window.raw["wrk"]["bytes"] == 9


@pytest.mark.parametrize("output", ["", WRK_TEXT, "{}", RESULT_LINE.replace("2000000", "0")])
def test_other_output_of_wrk_is_rejected(output):
    with pytest.raises(RunError, match="wrk: its last line is not a result"):
        load.parse_wrk(output)


def test_wrk_runs_the_script(tmp_path):
    """Runs a real wrk against a real server; wrk requests each path."""
    (tmp_path / "one").write_text("1" * 1000)
    (tmp_path / "two").write_text("2")
    port_file = tmp_path / "port"
    server_code = (
        "import http.server, sys, pathlib, functools\n"
        f"h = functools.partial(http.server.SimpleHTTPRequestHandler, directory={str(tmp_path)!r})\n"
        "s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), h)\n"
        f"pathlib.Path({str(port_file)!r}).write_text(str(s.server_port))\n"
        "s.serve_forever()\n"
    )
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(["python3", "-c", server_code], stderr=file)
    try:
        wait_until(lambda: port_file.exists() and port_file.read_text(), within_s=30)
        url = f"http://127.0.0.1:{port_file.read_text()}/"
        command = ["wrk", "--threads", "1", "--connections", "2", "--duration", "1s", "--script", load.WRK_SCRIPT, url]
        completed = subprocess.run([*command, "--", "/one", "/two"], capture_output=True, text=True, check=True)
    finally:
        server.kill()
        server.wait()
    window = load.parse_wrk(completed.stdout)
    assert window.throughput_per_s > 0 and window.failed == 0
    # If wrk exits before its last answers, the server has logged more requests than wrk has counted.
    requested = re.findall(r'"(GET [^"]*)"', log.read_text())
    assert set(requested) == {"GET /one HTTP/1.1", "GET /two HTTP/1.1"}
    assert abs(requested.count("GET /one HTTP/1.1") - requested.count("GET /two HTTP/1.1")) <= 2


class GuestWithCaches:
    """A guest that counts the commands that it gets."""

    name = "made-up"

    def __init__(self, reply="ok"):
        self.reply, self.dropped = reply, 0

    def command(self, line):
        assert line == "drop-caches"
        self.dropped += 1
        return self.reply


def test_caches_are_dropped_under_load():
    guest = GuestWithCaches()
    with load.without_caches(guest, 0.01):
        wait_until(lambda: guest.dropped >= 3)
    dropped_under_load = guest.dropped
    with load.without_caches(guest, 0.0):  # never
        pass
    assert guest.dropped == dropped_under_load


def test_a_guest_that_does_not_drop_its_caches_is_reported():
    guest = GuestWithCaches("error no")
    with pytest.raises(RunError, match="made-up: drop-caches: error no"), load.without_caches(guest, 0.01):
        wait_until(lambda: guest.dropped)
