"""A file that grows is read line by line, each line once."""

import pytest

from rekindle_lab.tail import Tail


@pytest.fixture
def tail(tmp_path):
    return Tail(tmp_path / "grows")


def append(tail, text):
    with tail.path.open("a") as file:
        file.write(text)


def test_a_line_is_returned_once_and_only_when_it_is_complete(tail):
    assert tail.lines() == []  # there is no file yet
    append(tail, "one\ntw")
    assert tail.lines() == ["one"]
    append(tail, "o\nthree\n")
    assert tail.lines() == ["two", "three"]
    assert tail.lines() == []


def test_a_file_that_was_truncated_is_read_from_its_start(tail):
    append(tail, "one\ntwo\n")
    tail.lines()
    tail.path.write_text("anew\n")
    assert tail.lines() == ["anew"]


def test_a_file_that_was_replaced_is_read_from_its_start(tail, tmp_path):
    """The new file is longer, so that only its inode number shows that it is another one."""
    append(tail, "old\n")
    tail.lines()
    tail.path.unlink()
    assert tail.lines() == []
    (tmp_path / "other").touch()  # takes the inode number of the old file
    tail.path.write_text("of another file\nand longer\n")
    assert tail.lines() == ["of another file", "and longer"]


def test_lines_written_so_far_can_be_skipped(tail):
    append(tail, "skipped\n")
    tail.skip()
    assert tail.lines() == []
    append(tail, "read\n")
    assert tail.lines() == ["read"]
