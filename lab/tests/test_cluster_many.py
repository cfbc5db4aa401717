"""Many guests that fail over together: what is lost is found in the records of each guest."""

import json

import pytest

from rekindle_lab.cluster.many import Answer, Committed, Guest, committed, faults_of


@pytest.fixture
def guest():
    """A guest that has lost nothing: it resumed from checkpoint 4, which was reported. Its new node has taken 5."""
    guest = Guest("web", "10.99.0.11", boot_id="ok 1", pages="ok 8", new_boot_id="ok 1", verified="ok 8")
    guest.running = ["n2"]
    guest.answers = [Answer(10, 20, 5), Answer(90, 110, 6)]
    guest.reported = [Committed(3, 50), Committed(4, 100)]
    guest.restored, guest.first_tick = 4, 6
    guest.listed = [(3, 7), (4, 7), (5, 9)]
    return guest


def test_nothing_is_lost(guest):
    assert faults_of(guest) == []


def test_a_commit_that_was_not_reported_any_more_is_resumed(guest):
    guest.reported.pop()
    assert faults_of(guest) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"running": []}, "runs 0 times"),
        ({"running": ["n1", "n2"]}, "runs 2 times"),
        ({"new_boot_id": "ok 2"}, "booted anew"),
        ({"new_boot_id": "", "boot_id": ""}, "booted anew"),
        ({"verified": "bad 3"}, "wrong memory"),
        ({"verified": "error", "pages": "error"}, "wrong memory"),
        ({"restored": None}, "resumed from None"),
        ({"restored": 3, "listed": [(3, 7), (4, 9)]}, "but Committed(number=4"),
        ({"reported": []}, "but None was reported"),
        ({"first_tick": 5}, "first tick is 5"),
        ({"first_tick": None}, "first tick is None"),
        ({"answers": [Answer(90, 110, 6)]}, "no client was answered"),
        ({"listed": [(3, 7), (4, 7), (5, 7), (6, 9)]}, "but 5 was committed"),
        ({"listed": [(5, 7), (6, 9)]}, "not in its store"),
        ({"listed": [(3, 7), (4, 7)]}, "no checkpoint was taken"),
    ],
)
def test_a_loss_is_found(guest, changes, fault):
    for name, value in changes.items():
        setattr(guest, name, value)
    assert any(fault in found for found in faults_of(guest))


def test_an_incomplete_line_is_not_a_report():
    event = {"event": "checkpoint", "number": 4, "stopped_host_us": 100}
    lines = ["tracking 84 MiB", json.dumps({"event": "filled"}), json.dumps(event), json.dumps(event)[:-1]]
    assert committed(lines) == [Committed(4, 100)]
