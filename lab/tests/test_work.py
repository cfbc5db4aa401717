"""The progress of a workload, from the marks that the guest prints when a unit, such as a file, is finished."""

import pytest

from rekindle_lab.work import Mark, Window

UNITS = 10
EVEN_MARKS = [(float(unit), unit) for unit in range(1, UNITS)]
"""Marks (host clock in s, finished units) of a run that finishes a unit each second."""
UNEVEN_MARKS = [(1.0, 1), (2.0, 2), (8.0, 3)]
"""Unit 3 takes 6 s, from 2 s to 8 s: half of it is finished at 5 s."""


def window(marks, began=0.0, ended=10.0):
    """Returns a run of 10 units with these marks; times are in s."""
    return Window("compile", count=UNITS, began=began, ended=ended, marks=[Mark(*mark) for mark in marks])


def test_between_two_marks_progress_is_linear():
    assert window(EVEN_MARKS).units_at(7.25) == pytest.approx(7.25)
    assert window(EVEN_MARKS).time_of_units(4.5) == pytest.approx(4.5)
    assert window(UNEVEN_MARKS).units_at(5.0) == pytest.approx(2.5)
    assert window(UNEVEN_MARKS).time_of_units(2.5) == pytest.approx(5.0)


def test_after_the_end_all_units_are_finished():
    assert window(EVEN_MARKS, ended=10.0).units_at(12.0) == UNITS


def test_progress_of_an_interrupted_run_follows_the_undisturbed_run():
    """3 s after its second mark, the interrupted run has finished half of unit 3, as the undisturbed one had."""
    interrupted = window([(101.0, 1), (102.0, 2)], began=100.0)
    assert interrupted.units_at_speed_of(window(UNEVEN_MARKS), 102.0 + 3.0) == pytest.approx(2.5)


def test_before_the_first_mark_nothing_is_finished():
    late = window([(3.0, 1)])
    assert late.units_at_speed_of(late, 2.0) == 0.0
