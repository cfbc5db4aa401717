"""The test bed of a cluster reports which QEMU runs its guest, and only while its watch and its client live."""

import json
import subprocess
import time

import pytest

from rekindle_lab.cluster.bed import Bed, BedError


@pytest.fixture
def bed(tmp_path):
    return Bed(tmp_path, tmp_path / "bed", {})


@pytest.fixture
def watched_bed(bed):
    """A bed whose client and watch are a process that only sleeps."""
    sleeper = subprocess.Popen(["sleep", "60"])
    bed.client = bed.watcher = sleeper
    yield bed
    sleeper.kill()
    sleeper.wait()


def write_beat(bed, qemus):
    """Writes a beat of the watch, which lists the present QEMUs; a minute ahead, so that it is newer than any call."""
    in_a_minute_us = time.time_ns() // 1000 + 60_000_000
    with bed.running_file.open("a") as file:
        file.write(json.dumps({"beat": qemus, "host_us": in_a_minute_us}) + "\n")


def test_the_watch_reports_the_only_qemu(watched_bed):
    write_beat(watched_bed, [[7, "n2"]])
    assert watched_bed.watched() == (7, "n2")


def test_two_qemus_of_one_guest_are_an_error(watched_bed):
    write_beat(watched_bed, [[7, "n2"], [8, "n3"]])
    with pytest.raises(BedError, match="2 QEMUs"):
        watched_bed.watched()


def test_a_watch_that_was_not_started_is_an_error(bed):
    with pytest.raises(BedError, match="has ended"):
        bed.watched()


def test_a_watch_that_has_ended_is_an_error(watched_bed):
    write_beat(watched_bed, [[7, "n2"]])
    watched_bed.watcher.kill()
    watched_bed.watcher.wait()
    with pytest.raises(BedError, match="has ended"):
        watched_bed.watched()
