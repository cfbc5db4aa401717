"""A fail-over in the records of a client: how far the guest's counter is set back, and the timeline of its parts.

A guest counts ticks, and a client requests the present count. A fail-over restores the guest on another node from a
checkpoint, so that the count is set back.
"""

import pytest

from rekindle_lab.cluster import counter, timeline
from rekindle_lab.cluster.counter import Answer
from rekindle_lab.cluster.events import BedEvent
from rekindle_lab.cluster.running import Span

START_US = 1_800_000_000_000_000
"""A time in microseconds since 1970. Times of the tests are in s after it."""
REQUEST_EVERY_S = 0.02
"""Interval of the client's requests, of which 2.5 fall on a tick of 50 ms."""


def us(seconds):
    """Returns a time in microseconds since 1970."""
    return START_US + round(seconds * 1e6)


def answers_from(begin_s, ticks):
    """Returns the answers with these ticks, one per request, from `begin_s` on."""
    return [Answer(us(begin_s + number * REQUEST_EVERY_S), tick) for number, tick in enumerate(ticks)]


def test_a_counter_that_is_set_back_and_a_silence_are_drops():
    before = answers_from(0, [122, 123, 124])
    last_answer_s = 2 * REQUEST_EVERY_S
    set_back = answers_from(3, [110, 111, 112])
    after_silence = answers_from(9, [140])
    first, second = counter.drops(before + set_back + after_silence)
    assert (first.highest, first.after.tick) == (124, 110)
    assert first.back == 124 - 110
    assert first.gap_s == pytest.approx(3 - last_answer_s)
    assert second.back == 0  # the counter has only grown


def test_a_drop_is_measured_from_the_highest_count_since_the_drop_before():
    first, second = counter.drops(answers_from(0, [50, 40, 45, 43]))
    assert (first.highest, first.back) == (50, 10)
    assert (second.highest, second.back) == (45, 2)


def test_a_timeline_has_the_parts_of_a_fail_over():
    """The last answer comes 10 ms before the kill, so the client is without an answer for 2.11 s."""
    fenced_s, running_s, answered_s, last_answer_s = 1.5, 2.0, 2.1, -0.01
    events = [BedEvent(START_US / 1e6, "kill n1"), BedEvent(START_US / 1e6 + fenced_s, "switch off n1 rc=0")]
    spans = [Span(1, "n1", us(-9), us(0)), Span(2, "n2", us(running_s), us(9))]
    answers = [Answer(us(last_answer_s), 50), Answer(us(answered_s), 40)]
    fail_over = timeline.last_fail_over(events, spans, answers)
    assert fail_over.node == "n1"
    lengths_s = [round((part.end_us - part.begin_us) / 1e6, 2) for part in fail_over.parts]
    assert lengths_s == pytest.approx(
        [fenced_s, running_s - fenced_s, answered_s - running_s, answered_s - last_answer_s]
    )
    assert "n2 chosen" in timeline.draw(fail_over.parts)


def test_a_timeline_needs_a_killed_node():
    with pytest.raises(ValueError, match="no node was killed"):
        timeline.last_fail_over([], [], [])
