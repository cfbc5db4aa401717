"""Workloads in a guest and their progress marks, and stores of checkpoints.

A workload (here "compile") prints a mark for each unit of work, such as a file; the lab notes when it appeared. A
window is one timed execution with its marks, as pairs (host clock in s, number of the unit).
"""

import subprocess

import pytest

from rekindle_lab.stores import certificates, on_disk
from rekindle_lab.work import Mark, Window


def window(marks, began=0.0, ended=10.0):
    """Returns a compile run of 10 units with these marks; times are seconds."""
    return Window("compile", count=10, began=began, ended=ended, marks=[Mark(*mark) for mark in marks])


def test_progress_between_two_marks_follows_the_undisturbed_run():
    """Unit 3 of the uneven run takes 6 s, from 2 s to 8 s: half of it is done at 5 s.

    In the interrupted run, 2 units were done after 2 s; 3 s later it is at half of unit 3 as well.
    """
    even = window([(float(unit), unit) for unit in range(1, 10)])  # a unit per second
    assert even.reached(4.5) == pytest.approx(4.5)
    assert even.place(7.25) == pytest.approx(7.25)
    assert even.place(12.0) == 10.0  # after the end
    # Files take different times: between two marks, progress follows the undisturbed run.
    uneven = window([(1.0, 1), (2.0, 2), (8.0, 3)])
    interrupted = window([(101.0, 1), (102.0, 2)], began=100.0)
    assert interrupted.position(105.0, uneven) == pytest.approx(2.5)
    assert uneven.reached(2.5) == pytest.approx(5.0)


def test_no_progress_before_the_first_mark():
    assert window([(3.0, 1)]).position(2.0, window([(3.0, 1)])) == 0.0


def test_certificates_are_signed_by_their_authority(tmp_path):
    """openssl accepts both certificates with that authority."""
    certificates(tmp_path)
    for role in ("server", "client"):
        command = ["openssl", "verify", "-CAfile", str(tmp_path / "ca.pem"), str(tmp_path / f"{role}.pem")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_every_store_has_a_path_of_its_own(tmp_path):
    """Two stores of one name have different paths, and a store can be removed alone."""
    stores = on_disk(tmp_path / "stores")
    store, other = stores.fresh("one"), stores.fresh("one")
    assert store.url == f"{stores.url}/{store.folder.name}" and store.folder.parent == stores.folder
    assert store.url != other.url and store.folder != other.folder
    store.folder.mkdir()
    (store.folder / "segment").write_bytes(b"x")
    store.forget()
    store.remove()
    assert not store.folder.exists()
