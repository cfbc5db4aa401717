"""One reboot of the emulated host, with a client at each guest, and its stages."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rekindle_lab.rekindle import Rekindle, gap_around

from .machine import UP_S, Guest, Machine, MachineError, now_us
from .rows import Row

EVERY = "20ms"
"""Interval at which the client opens a connection: bounds the error of the time at which a guest returns."""
SETTLED_S = 1.0
"""Seconds for which the client uses the guests after the reboot."""
REBOOT_S = 480.0
"""Deadline for the new kernel to report the outcome of each guest."""
OUTCOME_LINES = ("resumed with its memory", "after it was shut down", "booted from its disks", "not resumed")
"""Words of the console lines in which the host reports the outcome of a guest."""
SAVED_LINE = r"suspended, its RAM|: shut down"


@dataclass
class Rebooted:
    """Observations of one reboot. Times are microseconds since 1970 by this machine's clock."""

    how: str
    command_us: int
    """When the command to reboot was started."""
    kernel_us: int = 0
    """When the new kernel began."""
    stages: dict[str, int] = field(default_factory=dict)
    """Values for fields of `Row` that all guests share."""
    steps: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Steps of suspend and resume from Rekindle's timeline, by name of the VM."""
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reports of the clients, by name of the VM."""
    entered_by_kexec: bool = False
    """Whether the new kernel was entered by kexec."""


def reboot(host: Machine, rekindle: Rekindle, guests: Sequence[Guest], how: str, *, fault: bool = False) -> Rebooted:
    """Reboots the host under `guests`. Waits until the host is up and the guests answer, or their deadline has passed.

    With a `fault` the host need not report the outcome of each guest: the queries take some of the host's time.
    """
    before, _ = host.boot()
    targets = [(f"tcp://{guest.address}:7", host.netns) for guest in guests]
    with rekindle.probes(targets, "--timeout", "500ms", "--interval", "500ms", every=EVERY) as probes:
        rebooted = Rebooted(how, now_us())
        host.ask(f"rekindle reboot-host --how {how}")
        if fault:
            wait_active(host, before)
        else:
            wait_done(host, rebooted.command_us, len(guests))
        for guest in guests:
            try:
                guest.wait_ready()
            except MachineError:
                break  # the caller reports the guest's outcome as `gone`
        time.sleep(SETTLED_S)
    _, rebooted.kernel_us = host.wait_boot(before)
    rebooted.probes = {guest.name: probe.report for guest, probe in zip(guests, probes, strict=True)}
    read_records(host, rebooted, [guest.name for guest in guests])
    return rebooted


def wait_done(host: Machine, since_us: int, guests: int) -> None:
    """Waits until the new kernel has reported the outcome of each guest."""
    end = time.monotonic() + REBOOT_S

    def reported() -> int:
        lines = [line for at_us, line in list(host.seen.console) if at_us >= since_us]
        return sum(any(words in line for words in OUTCOME_LINES) for line in lines)

    while reported() < guests:
        if time.monotonic() > end:
            raise MachineError(f"no outcome of all its guests within {REBOOT_S:g} s: {host.console()[-1500:]}")
        time.sleep(0.1)


def wait_active(host: Machine, before: str) -> None:
    """Waits until the unit that resumes guests has finished, in a boot other than `before`."""
    host.wait_boot(before, REBOOT_S)
    end = time.monotonic() + REBOOT_S
    while (state := host.ask("systemctl is-active rekindle-resume || :").strip()) != "active":
        if time.monotonic() > end:
            raise MachineError(f"rekindle-resume.service is still {state} after {REBOOT_S:g} s")
        time.sleep(0.5)


def read_records(host: Machine, rebooted: Rebooted, names: Sequence[str]) -> None:
    """Reads the host's own records: the steps of its guests, and when user space began."""
    files = " ".join(f"/run/rekindle/{name}/timeline.jsonl" for name in names)
    output = host.ask(f"cat /proc/cmdline; systemctl show -P UserspaceTimestampMonotonic; cat {files} 2>/dev/null || :")
    command_line, userspace, *lines = output.splitlines()
    rebooted.entered_by_kexec = "rekindle.token=" in command_line
    entries = [json.loads(line) for line in lines if line.strip()]
    rebooted.steps = {name: last_reboot([entry for entry in entries if entry["vm"] == name]) for name in names}
    rebooted.stages = stages(
        list(rebooted.steps.values()),
        Milestones(
            command_us=rebooted.command_us,
            silent_us=_first_silence(rebooted),
            saved_us=host.seen.last_line(SAVED_LINE, rebooted.command_us),
            reset_us=host.seen.first_reset(rebooted.command_us),
            kernel_us=rebooted.kernel_us,
        ),
        kernel_to_userspace_us=int(userspace),
    )


def last_reboot(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the steps of the last suspend, and of the resume after it, from a VM's timeline."""
    ours = [entry for entry in entries if entry["operation"].startswith("host ")]
    suspends = [entry["operation"].startswith("host suspend") for entry in ours]
    if not any(suspends):
        return []
    first = len(suspends) - 1 - suspends[::-1].index(True)
    while first > 0 and suspends[first - 1]:
        first -= 1
    return [{key: value for key, value in entry.items() if key != "vm"} for entry in ours[first:]]


def _first_silence(rebooted: Rebooted) -> int | None:
    starts = [gap_around(report, None, None)[0] for report in rebooted.probes.values()]
    return min((start for start in starts if start), default=None)


@dataclass(frozen=True)
class Milestones:
    """When a reboot has reached its stages, in microseconds since 1970 by this machine's clock."""

    command_us: int
    """The command to reboot was started."""
    silent_us: int | None
    """The first guest did not answer any more."""
    saved_us: int | None
    """The last guest was suspended or shut down."""
    reset_us: int | None
    """The machine was reset; `None` if kexec entered the kernel."""
    kernel_us: int
    """The new kernel began."""


def stages(
    steps_by_guest: Sequence[Sequence[dict[str, Any]]], milestones: Milestones, *, kernel_to_userspace_us: int
) -> dict[str, int]:
    """Returns the durations of a reboot's stages: the fields of `Row` that all its guests share."""
    steps = [step for of_guest in steps_by_guest for step in of_guest]
    return {
        "kernel_us": kernel_to_userspace_us,
        **_suspend_stages([step for step in steps if step["operation"].startswith("host suspend")]),
        **_resume_stages([step for step in steps if step["operation"] == "host resume"], kernel_to_userspace_us),
        **_stages_between(milestones),
    }


def _end_ns(step: dict[str, Any]) -> int:
    """Returns the end of a step by the monotonic clock of the kernel in which it ran, which starts with the kernel."""
    return step["start_mono_ns"] + step["us"] * 1000


def _suspend_stages(steps: Sequence[dict[str, Any]]) -> dict[str, int]:
    durations_us: dict[str, int] = {}
    if stops := [step for step in steps if step["phase"] == "suspend"]:
        first_ns = min(step["start_mono_ns"] for step in stops)
        durations_us["suspend_us"] = (max(map(_end_ns, stops)) - first_ns) // 1000
    if preparations_us := [step["us"] for step in steps if step["phase"] == "prepare"]:
        durations_us["ahead_us"] = sum(preparations_us)
    return durations_us


def _resume_stages(steps: Sequence[dict[str, Any]], kernel_to_userspace_us: int) -> dict[str, int]:
    # From the last guest's bridges on, the host provides all that guests need.
    ready_ns = max((_end_ns(step) for step in steps if step["step"] == "wait for its bridges"), default=None)
    running_ns = max((_end_ns(step) for step in steps if step["phase"] == "resume"), default=None)
    if ready_ns is None:
        return {}
    durations_us = {"userspace_us": ready_ns // 1000 - kernel_to_userspace_us}
    if running_ns is not None:
        durations_us["resume_us"] = (running_ns - ready_ns) // 1000
    return durations_us


def _stages_between(milestones: Milestones) -> dict[str, int]:
    durations_us: dict[str, int] = {}
    if milestones.silent_us is not None:
        durations_us["services_us"] = milestones.silent_us - milestones.command_us
    if milestones.saved_us is not None:
        durations_us["down_us"] = (milestones.reset_us or milestones.kernel_us) - milestones.saved_us
    if milestones.reset_us is not None:
        durations_us["firmware_us"] = milestones.kernel_us - milestones.reset_us
    return durations_us


def rows(
    case: str,
    round_number: int,
    guests: Sequence[Guest],
    rebooted: Rebooted,
    outcomes: dict[str, str],
    sessions: dict[str, bool],
) -> Iterator[Row]:
    """Yields a row for each guest. `outcomes`: see `Row.outcome`; `sessions`: whether each still echoes; by guest."""
    for guest in guests:
        start, end, length = gap_around(rebooted.probes[guest.name], None, None)
        row = Row(
            case=case,
            how=rebooted.how,
            vms=len(guests),
            memory_mib=guest.memory_mib,
            round=round_number,
            vm=guest.name,
            gap_us=length,
            gap_start_host_us=start or None,
            gap_end_host_us=end or None,
            outcome=outcomes[guest.name],
            wanted="booted" if rebooted.how == "cold" else "kept",
            sessions=1,
            sessions_lost=int(not sessions[guest.name]),
            steps=rebooted.steps.get(guest.name, []),
        )
        for name, value in rebooted.stages.items():
            setattr(row, name, value)
        yield row


@contextmanager
def with_guests(host: Machine, number: int, memory_mib: int) -> Iterator[list[Guest]]:
    """Starts guests in the host and fills them."""
    guests = [Guest(host, f"guest{n}", f"10.78.1.{n}", memory_mib) for n in range(1, number + 1)]
    try:
        for guest in guests:
            guest.start()
        for guest in guests:
            guest.wait_ready(UP_S)
            guest.fill()
        yield guests
    finally:
        for guest in guests:
            guest.end_session()
