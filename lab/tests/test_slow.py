"""Loop devices, which slow disks are made of, are removed with their last users, so that a kill leaves none."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rekindle_lab.slow import loop_device

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(),
    reason="makes loop devices: needs root and a kernel with them",
)
DEADLINE_S = 60.0
# A program that holds a loop device on the file of its argument, and prints the device's name.
HOLD = """
import sys, time
from pathlib import Path
from rekindle_lab.slow import loop_device
with loop_device(Path(sys.argv[1])) as device:
    print(device, flush=True)
    time.sleep(600)
"""


def wait_detached(device: str) -> None:
    """Waits until the device is detached, or attached to another file."""
    deadline = time.monotonic() + DEADLINE_S
    while "held.raw" in subprocess.run(["losetup", "--list", device], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, f"{device} is still attached"
        time.sleep(0.01)


def test_a_loop_device_is_removed_with_its_last_user(tmp_path):
    """The device stays usable although its file has no name any more."""
    image = tmp_path / "held.raw"
    image.write_bytes(b"x" * (1 << 20))
    with loop_device(image) as device:
        image.unlink()
        assert Path(device).read_bytes() == b"x" * (1 << 20)
    wait_detached(device)


def test_a_loop_device_is_removed_when_its_process_is_killed(tmp_path):
    image = tmp_path / "held.raw"
    image.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-c", HOLD, str(image)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        device = process.stdout.readline().strip()
        assert "held.raw" in subprocess.run(["losetup", "--list", device], capture_output=True, text=True).stdout
        process.kill()
    wait_detached(device)
