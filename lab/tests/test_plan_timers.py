"""The timers that carry out a plan: systemd units, and the script `rekindle-renew` that they run.

A timer fires every few minutes; the script decides whether a renewal is due. Independent timers count intervals from a
fixed moment, the phase. Coupled ones count from a stamp, a file whose time is that of the last renewal, because another
renewal sets it, too: a cold renewal of the VMM also reboots the OS.
"""

import os
import shutil
import signal
import subprocess

import pytest
from invented_fleet import TEXT, fleet
from waiting import wait_until

from rekindle_lab.models.parameters import DAY_S
from rekindle_lab.plan.command import make, of_host
from rekindle_lab.plan.timers import HostPlan, Vm, units
from rekindle_lab.toml import DefinitionError

START_UNIX_S = 1_800_000_000


def host_plan(name="web-2"):
    """Returns a host's part of the plan of `invented_fleet`."""
    return of_host(make(fleet()), name, START_UNIX_S)


def test_a_hosts_phases_follow_from_its_place_in_the_order():
    plan = host_plan()
    index = make(fleet()).rolling.hosts.index("web-2")
    assert plan.vmm_phase_s == START_UNIX_S + round(index * 28 * DAY_S / 10)  # 10 hosts in 28 days
    assert [vm.name for vm in plan.vms] == ["front-1", "front-2", "gpu"]
    phases = [vm.os_phase_s for vm in plan.vms]
    assert phases[1] - phases[0] == pytest.approx(7 * DAY_S / 3, abs=1)  # three VMs in the OS's 7 days
    with pytest.raises(DefinitionError, match="no host 'x'"):
        host_plan("x")


def test_units_are_what_systemd_understands(tmp_path):
    for name, content in units(host_plan(), "/bin/true").items():
        (tmp_path / name).write_text(content.replace("/etc/rekindle/plan", str(tmp_path)))
    (tmp_path / "rekindle-renew").chmod(0o755)
    analyze = shutil.which("systemd-analyze")
    assert analyze, "no systemd-analyze in PATH (Debian: systemd)"
    files = sorted(str(path) for path in tmp_path.iterdir() if path.suffix in (".service", ".timer"))
    assert len(files) == 12  # a service and a timer for the VMM and for the OS of three VMs
    completed = subprocess.run([analyze, "verify", "--man=no", *files], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    assert str(tmp_path) not in completed.stderr, completed.stderr
    assert subprocess.run(["shellcheck", tmp_path / "rekindle-renew"], check=False).returncode == 0


def test_warm_timers_are_independent_and_cold_ones_coupled():
    """gpu is renewed cold: its VMM's renewal sets the stamp `os-gpu`, too."""
    vmm_interval_s, os_interval_s = 28 * 86_400, 7 * 86_400
    files = units(host_plan(), "/usr/bin/rekindle")

    def renew_arguments(name):
        return files[f"rekindle-plan-{name}.service"].splitlines()[-1].partition("rekindle-renew ")[2]

    phase = host_plan().vmm_phase_s
    command = "-- /usr/bin/rekindle replace-qemu"
    assert renew_arguments("vmm-front-1") == f"vmm-front-1 {vmm_interval_s} {phase} {command} front-1 --how warm"
    assert renew_arguments("vmm-gpu") == f"vmm-gpu {vmm_interval_s} {phase} os-gpu {command} gpu --how cold"
    assert renew_arguments("os-gpu").startswith(f"os-gpu {os_interval_s} - -- ")
    assert renew_arguments("os-front-1").startswith(f"os-front-1 {os_interval_s} 18")  # a phase near START_UNIX_S
    assert "reboot front-1 --how cold" in renew_arguments("os-front-1")


def test_every_unit_has_a_time_limit():
    for name, text in units(host_plan(), "/usr/bin/rekindle").items():
        if name.endswith(".service"):
            timeouts = [line for line in text.splitlines() if line.startswith("TimeoutStartSec=")]
            assert timeouts and "infinity" not in timeouts[0], name


def test_processes_of_a_unit_outlive_it():
    for name, text in units(host_plan(), "/usr/bin/rekindle").items():
        if name.endswith(".service"):
            assert {"KillMode=process", "SendSIGKILL=no", "OOMPolicy=continue"} <= set(text.splitlines())


def host(*ways):
    """Returns the plan of a host that is rebooted as a whole, with a VM for each of these ways to renew its VMM."""
    vms = tuple(
        Vm(f"vm{number}", vmm=way, os="cold", coupled=way == "cold", os_interval_s=10, os_phase_s=0)
        for number, way in enumerate(ways)
    )
    return HostPlan("h", scope="host", vmm_interval_s=100, vmm_phase_s=0, vms=vms)


@pytest.mark.parametrize(
    ("ways", "command"),
    [
        (("warm", "warm"), "host 100 0 -- /usr/bin/rekindle reboot-host --how warm"),
        (("warm", "cold"), "host 100 0 os-vm1 -- /usr/bin/rekindle reboot-host --how warm --others cold"),
        (("saved", "warm"), "host 100 0 -- /usr/bin/rekindle reboot-host --how warm --others saved"),
        (("saved",), "host 100 0 -- /usr/bin/rekindle reboot-host --how saved"),
    ],
)
def test_a_hosts_reboot_treats_vms_that_cannot_be_kept_as_planned(ways, command):
    assert units(host(*ways), "/usr/bin/rekindle")["rekindle-plan-host.service"].splitlines()[-1].endswith(command)


def test_renewals_that_timers_cannot_do_are_rejected():
    with pytest.raises(DefinitionError, match="some saved and some shut down"):
        units(host("warm", "saved", "cold"), "/usr/bin/rekindle")
    with pytest.raises(DefinitionError, match=r"VM 'vm0': vmm\.live cannot be done"):
        units(host("live"), "/usr/bin/rekindle")


class Renewals:
    """`rekindle-renew` with a fake clock (times are its seconds) and other fake tools, which are found in `bin` first.

    The renewal itself appends a line to the file `done`, then runs the script that `does` has set.
    """

    def __init__(self, folder):
        self.folder = folder
        (folder / "bin").mkdir()
        self.tool("date", f"cat {folder}/now")
        self.tool("systemctl", f"cat {folder}/system 2>/dev/null || echo running")
        self.tool("renewal", f"echo x >> {folder}/done\n. {folder}/does")
        (folder / "renew").write_text(units(host_plan(), "/bin/true")["rekindle-renew"])
        self.does("exit 0")
        # With a clock that stands still, a stamp gets the time that the clock shows.
        self.tool("touch", '[ "$1" = -d ] && exec /usr/bin/touch "$@"\nexec /usr/bin/touch -d "@$(date)" "$@"')

    def tool(self, name, script):
        """Replaces a program."""
        (self.folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def does(self, script):
        """Sets what the renewal does."""
        (self.folder / "does").write_text(script)

    @property
    def environment(self):
        return {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin",
            "REKINDLE_STAMPS": str(self.folder / "stamps"),
            "REKINDLE_RENEWAL_LOCK": str(self.folder / "lock"),
        }

    def command(self, name, interval, phase, *also):
        """Returns the command that a timer runs: renewal `name`, which also sets the stamps of `also`."""
        return ["sh", str(self.folder / "renew"), name, str(interval), str(phase), *also, "--", "renewal"]

    def check(self, now, interval, phase, *also, name="x"):
        """Runs a check; returns whether it renewed, and the exit status."""
        (self.folder / "now").write_text(str(now))
        before = self.count
        completed = subprocess.run(
            self.command(name, interval, phase, *also), env=self.environment, check=False, timeout=20
        )
        return self.count > before, completed.returncode

    @property
    def count(self):
        """Number of renewals so far."""
        return len((self.folder / "done").read_text().splitlines()) if (self.folder / "done").exists() else 0


def test_independent_timers_keep_time_whatever_their_lateness(tmp_path):
    """An interval of 1000 s from 2000 on, checked every 70 s: renewed at the first check after each multiple."""
    renewals = Renewals(tmp_path)
    renewed = [now for now in range(1000, 9000, 70) if renewals.check(now, 1000, 2000) == (True, 0)]
    due = range(2000, 9000, 1000)
    assert len(renewed) == len(due)
    assert all(0 <= now - due_now < 70 for now, due_now in zip(renewed, due, strict=True))


def test_coupled_timers_count_from_the_last_renewal(tmp_path):
    """An interval of 500 s without a phase: due 500 s after the stamp, which the VMM's renewal sets at 1700."""
    renewals = Renewals(tmp_path)
    assert renewals.check(1000, 500, "-") == (False, 0)  # the first check only starts the interval
    assert renewals.check(1499, 500, "-") == (False, 0)
    assert renewals.check(1500, 500, "-") == (True, 0)
    renewals.check(1600, 100, 1650, "x", name="vmm")
    assert renewals.check(1700, 100, 1650, "x", name="vmm") == (True, 0)  # for the VMM; also sets the stamp of `x`
    assert renewals.check(2199, 500, "-") == (False, 0)
    assert renewals.check(2200, 500, "-") == (True, 0)


def test_a_failed_renewal_is_tried_again_after_an_hour_and_not_at_each_check(tmp_path):
    """Fails at 2100; is tried again at 5700, 3600 s later. The next one is due at 12,000, one interval after 2000."""
    renewals = Renewals(tmp_path)
    renewals.check(1000, 10_000, 2000)
    renewals.does("exit 1")
    assert renewals.check(2100, 10_000, 2000) == (True, 1)
    assert [renewals.check(now, 10_000, 2000)[0] for now in range(2400, 5700, 300)] == [False] * 11
    renewals.does("exit 0")
    assert renewals.check(5700, 10_000, 2000) == (True, 0)
    assert renewals.check(11_900, 10_000, 2000) == (False, 0)
    assert renewals.check(12_000, 10_000, 2000) == (True, 0)


def test_a_renewal_that_reboots_the_host_sets_its_stamps(tmp_path):
    renewals = Renewals(tmp_path)
    renewals.check(1000, 1000, 2000, "os")
    renewals.does("kill -TERM $PPID; exit 0")  # as systemd does after a request of `rekindle reboot-host` to reboot
    assert renewals.check(2000, 1000, 2000, "os") == (True, 0)
    assert {name: int((tmp_path / "stamps" / name).stat().st_mtime) for name in ("x", "os")} == {"x": 2000, "os": 2000}
    assert not (tmp_path / "stamps" / ".x.tried").exists()
    assert renewals.check(2999, 1000, 2000, "os") == (False, 0)


@pytest.mark.parametrize("does", ["kill -TERM $PPID; exit 1", "kill -TERM $$; sleep 60; exit 0"])
def test_an_interrupted_renewal_sets_no_stamps(tmp_path, does):
    renewals = Renewals(tmp_path)
    renewals.check(1000, 10_000, 2000, "os")
    renewals.does(does)
    renewed, status = renewals.check(2000, 10_000, 2000, "os")
    assert renewed and status != 0
    assert (tmp_path / "stamps" / "x").stat().st_mtime == 1000
    assert not (tmp_path / "stamps" / "os").exists()
    renewals.does("exit 0")
    assert renewals.check(5600, 10_000, 2000, "os") == (True, 0)


def test_stamps_are_on_disk_before_the_mark_is_removed(tmp_path):
    """The fake `sync` logs each file while the mark of the attempt, .x.tried, exists."""
    renewals = Renewals(tmp_path)
    renewals.check(1000, 1000, 2000, "os")
    renewals.does(f"echo renewed >> {tmp_path}/synced")
    renewals.tool("sync", f'[ -e {tmp_path}/stamps/.x.tried ] && basename "$1" >> {tmp_path}/synced')
    assert renewals.check(2000, 1000, 2000, "os") == (True, 0)
    assert (tmp_path / "synced").read_text().split() == [".x.tried", "renewed", "x", "os"]


def test_nothing_starts_during_a_shutdown_or_without_a_writable_stamp(tmp_path):
    renewals = Renewals(tmp_path)
    renewals.check(1000, 100, 2000)
    (tmp_path / "system").write_text("stopping")
    assert renewals.check(2000, 100, 2000) == (False, 0)
    (tmp_path / "system").unlink()
    (tmp_path / "stamps" / ".x.tried").mkdir()
    renewals.tool("touch", "exit 1")
    renewed, status = renewals.check(9000, 100, 2000)
    assert not renewed and status != 0


def test_a_clock_that_was_wrong_does_not_stop_renewals(tmp_path):
    """The first stamp is in the future of the corrected clock, and is replaced by the present time."""
    renewals = Renewals(tmp_path)
    renewals.check(1_000_000, 100, "-")
    assert renewals.check(1000, 100, "-") == (False, 0)
    assert renewals.check(1100, 100, "-") == (True, 0)


def test_remaining_processes_do_not_hold_the_lock_and_due_is_checked_under_it(tmp_path):
    renewals = Renewals(tmp_path)
    renewals.check(1000, 100, 2000)
    renewals.does(
        f"setsid sleep 1000 & echo $! > {tmp_path}/left; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; exit 0"
    )
    (tmp_path / "now").write_text("2000")
    first, second = (subprocess.Popen(renewals.command("x", 100, 2000), env=renewals.environment) for _ in range(2))
    try:
        wait_until(lambda: (tmp_path / "left").exists())
        (tmp_path / "go").touch()
        assert (first.wait(20), second.wait(20)) == (0, 0)
        assert renewals.count == 1  # the second renewal waited, and then was not due any more
        renewals.does("exit 0")
        assert renewals.check(2100, 100, 2000) == (True, 0)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)


def test_a_missed_target_names_the_interval_with_one_os_reboot_less(tmp_path):
    """28.01 days contain four OS reboots every 7 days after a cold renewal of 243 s; up to 28.0028 days, three."""
    text = TEXT.replace("vmm_interval_max_d = 28", "vmm_interval_max_d = 28.01").replace(
        "availability = 0.9999", "availability = 0.99985"
    )
    plan = make(fleet(text.replace('allow_vmm = ["saved", "cold"]', 'allow_vmm = ["cold"]')))
    (problem,) = plan.problems
    assert "an interval of the VMM of 28.0028 days: it contains one OS reboot less" in problem
