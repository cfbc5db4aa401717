"""Topic `os`: the stages of a guest's boot are observed from outside, at its firmware and by its clock."""

import pytest

from rekindle_bench.os import boot


def test_the_kernels_clock_and_systemds():
    """The error of a start is half the time of a request, here less than a second."""

    class Guest:
        replies = iter(["ok 12.500", "ok 12.501"])

        def command(self, line):
            assert line == "uptime"
            return next(self.replies, "ok 12.502")

    began = boot.kernel_began(Guest())
    assert 0 <= began.within_us < 1_000_000
    assert boot.user_space_after_us("UserspaceTimestampMonotonic=2345678\n") == 2_345_678
    with pytest.raises(ValueError, match="UserspaceTimestampMonotonic"):
        boot.user_space_after_us("Unknown property")


def test_only_new_output_of_the_firmware_counts(tmp_path):
    """The file of the previous QEMU has the same words."""
    path = tmp_path / "firmware"
    path.write_text("Booting from ROM...\n")
    with boot.Firmware(path) as firmware:
        assert not path.exists()
    assert firmware.host_us is None
    with boot.Firmware(path) as firmware:
        path.write_text("SeaBIOS (version 1)\nBooting from ROM...\n")
        firmware._thread.join(10)
    assert firmware.host_us is not None
