"""Samples of a guest's status: parsed from its /proc, and taken over one ssh session. No guest is started."""

from pathlib import Path

import pytest

from rekindle_lab.experiment.inside import END_OF_SAMPLE, GuestStatus
from rekindle_lab.experiment.inside import parse as parse_status

# A sample as the guest prints it: parts of /proc/loadavg, /proc/stat, /proc/meminfo and /proc/vmstat.
STATUS = """0.10 0.20 0.30 1/90 400
cpu  100 0 50 800 50 0 0 0 0 0
MemFree:          1000 kB
Buffers:           200 kB
Cached:            300 kB
Slab:               70 kB
pgpgin 5000
pgpgout 60
"""


def test_a_guests_status_is_parsed():
    """Between the two samples, 50 of 100 ticks are busy (30 user, 20 system), and 100 KiB are paged in.

    Free memory includes buffers and caches: 1000 + 200 + 300 KiB.
    """
    first = parse_status(STATUS)
    assert first == {
        "load_15min": 0.3,
        "ticks": 1000,
        "idle_ticks": 850,
        "free_kib": 1500,
        "slab_kib": 70,
        "paged_kib": 5060,
    }
    last = parse_status(STATUS.replace("100 0 50 800 50", "130 0 70 850 50").replace("5000", "5100"))
    assert GuestStatus.responses([first, last]) == {
        "guest_cpu_pct": 50.0,
        "guest_load": 0.3,
        "guest_free_kib": 1500.0,
        "guest_io_blocks": 100.0,
    }


class Shell:
    """A guest whose shell is a command of this machine."""

    name = "made-up"

    def __init__(self, *words):
        self.words = words

    def ssh_command(self, command):
        assert command == "sh"
        return list(self.words)


def test_all_samples_come_over_one_session(tmp_path):
    """A fake shell logs its process; the three samples (one at the start) come from the same."""
    answer = tmp_path / "answer"
    answer.write_text(f"{STATUS}{END_OF_SAMPLE}\n")
    script = f"echo $$ >>{tmp_path}/pids; while read -r line; do cat {answer}; done"
    with GuestStatus(Shell("sh", "-c", script)) as status:
        assert status.take() == status.take()
    (pid,) = (tmp_path / "pids").read_text().split()
    assert not Path("/proc", pid).exists()


def test_a_session_that_ends_is_reported():
    with pytest.raises(RuntimeError, match="made-up: ssh: ended: no route"):
        GuestStatus(Shell("sh", "-c", "read line; echo no route >&2")).__enter__()
