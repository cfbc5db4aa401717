"""Does the action of a run: reboots the guest's OS or its VMM while a client requests its service (`reboot`).

Downtime is the client's longest time without an answer. The settings of the run's level (`reboot`, `how`, `options`)
select the reboot; `settings.py` lists them. `GuestSpec` is the guest table of the experiment's definition.
"""

import time
from typing import Any

from rekindle_lab.experiment.definition import Guest as GuestSpec
from rekindle_lab.experiment.runner import Measured, RunError
from rekindle_lab.experiment.subject import NAME, Subject
from rekindle_lab.os_guest import ask_often
from rekindle_lab.page_client import PageClient, longest_gap
from rekindle_lab.rekindle import Rekindle, failed_requests, gap_around

ANSWERS_AROUND_GAP = 10
"""Number of answers required before and after a gap, for the gap to count: a single answer may be chance."""
UNDISTURBED_S = 0.5
"""Seconds for which the client asks before the reboot, after its first answers."""


def reboot(
    rekindle: Rekindle, guest: Subject, guest_spec: GuestSpec, settings: dict[str, Any], measured: Measured
) -> None:
    """Reboots, and adds the responses to `measured`."""
    how = ["--how", settings["how"]] if "how" in settings else []
    command = [{"os": "reboot", "vmm": "replace-qemu"}[settings["reboot"]], NAME, *how, *settings.get("options", [])]
    if settings["reboot"] == "vmm":
        _reboot_vmm(rekindle, guest, guest_spec, command, measured)
    else:
        _reboot_os(rekindle, guest, guest_spec, command, measured)


def _reboot_vmm(
    rekindle: Rekindle, guest: Subject, guest_spec: GuestSpec, command: list[str], measured: Measured
) -> None:
    """Replaces the QEMU under a guest: the client keeps its connections."""
    # A cold reboot breaks the connections, so the client must soon stop waiting and connect again. Any other way keeps
    # them: there a timeout would only add a failure to a long gap.
    answer_timeout = "5s" if "cold" in command else "300s"
    options = ("--connections", str(guest_spec.connections), "--timeout", answer_timeout)
    with rekindle.probes([(guest.service_url, guest.netns)], *options, every=guest_spec.every) as probes:
        document = rekindle.call(*command)
        guest.wait_ready()
        time.sleep(guest_spec.settle_s)
    report = probes[0].report
    measured.samples.append({"reboot": document, "client": report})
    measured.responses["downtime_s"] = gap_around(report, None, None).length_us / 1e6
    measured.responses["failed_requests"] = measured.responses.get("failed_requests", 0.0) + failed_requests(report)


def _reboot_os(
    rekindle: Rekindle, guest: Subject, guest_spec: GuestSpec, command: list[str], measured: Measured
) -> None:
    """Reboots the guest's system. The client connects anew for each request, since a reboot kills connections."""
    ask_often(guest.netns)
    with PageClient(guest.netns, guest.address, guest.path) as client:
        client.wait(ANSWERS_AROUND_GAP)
        time.sleep(UNDISTURBED_S)
        began_us = time.time_ns() // 1000
        document = rekindle.call(*command)
        client.wait(ANSWERS_AROUND_GAP, after_host_us=max(began_us, document["resume_host_us"]))
        guest.wait_ready()
        time.sleep(guest_spec.settle_s)
    phase = document.get("phase") or {}
    if guest.phases and not phase.get("candidate"):
        raise RunError(f"{NAME}: it was booted, not resumed from a phase: {phase.get('skipped')}", measured=measured)
    gap = longest_gap(client.answers, began_us)
    answers_ms = sorted((answer.host_us - began_us) // 1000 for answer in client.answers)
    client_report = {"began_host_us": began_us, "answers_ms": answers_ms, "first_us": gap.first_us}
    measured.samples.append({"reboot": document, "client": client_report})
    measured.responses["downtime_s"] = gap.us / 1e6
