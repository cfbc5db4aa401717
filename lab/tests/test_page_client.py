"""The client that requests a page all the time: what counts as an answer, and the longest gap between answers."""

import http.server
import random
import threading

import pytest

from rekindle_lab import page_client
from rekindle_lab.page_client import Answer, PageClient, longest_gap
from rekindle_lab.rekindle import RekindleError

ANSWER_ENDS_US = (0, 100, 5_000, 5_100)
"""When fast answers end, in microseconds after the client's start."""
LAST_END_US = 9_000
"""When a slow answer ends."""


def shuffled_answers():
    """Returns the answers in another order, as the connections of a client append them."""
    answers = [*(Answer(end_us, 7) for end_us in ANSWER_ENDS_US), Answer(LAST_END_US, 33)]
    random.Random(1).shuffle(answers)
    return answers


def test_the_longest_gap_is_the_one_around_a_reboot():
    reboot_us = 5_050
    gap = longest_gap(shuffled_answers(), reboot_us)
    assert (gap.start_host_us, gap.end_host_us) == (5_100, LAST_END_US)
    assert gap.us == LAST_END_US - 5_100
    assert gap.first_us == 33


def test_a_gap_that_began_before_the_reboot_counts():
    assert longest_gap(shuffled_answers(), 0).us == 5_000 - 100


def test_a_reboot_without_a_later_answer_is_an_error():
    with pytest.raises(RekindleError):
        longest_gap(shuffled_answers(), LAST_END_US + 1_000)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status = 200

    def do_GET(self):
        self.send_response(self.status)
        self.send_header("Content-Length", "5000")
        self.end_headers()
        self.wfile.write(b"x" * (5000 if self.path == "/whole" else 100))

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    ("path", "status", "answered"), [("/whole", 200, True), ("/half", 200, False), ("/whole", 503, False)]
)
def test_only_a_whole_answer_counts(monkeypatch, path, status, answered):
    """A page that ends early, or an error, is no answer."""
    monkeypatch.setattr(page_client, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(page_client.netns, "inside", lambda _, function: function())
    monkeypatch.setattr(Handler, "status", status)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        asks = PageClient("none", "127.0.0.1", path, port)
        if answered:
            with asks:
                asks.wait(5)
        else:
            assert not asks.ask_once()
        assert bool(asks.answers) == answered
    finally:
        server.shutdown()
