"""The action of a level: a reboot, with a client at the guest. Downtime is the longest time without an answer."""

import time
from typing import Any

from rekindle_lab.experiment.definition import Guest as About
from rekindle_lab.experiment.runner import Measured, RunError
from rekindle_lab.experiment.subject import NAME, Subject
from rekindle_lab.os_guest import ask_often
from rekindle_lab.page_client import PageClient, longest_gap
from rekindle_lab.rekindle import Rekindle, failed_requests, gap_around

ANSWERS = 10
"""Number of answers required before and after a gap, for the gap to count."""
UNDISTURBED_S = 0.5


def reboot(rekindle: Rekindle, guest: Subject, about: About, settings: dict[str, Any], measured: Measured) -> None:
    """Reboots, and adds the responses to `measured`."""
    how = ["--how", settings["how"]] if "how" in settings else []
    words = ["reboot", settings["reboot"], NAME, *how, *settings.get("options", [])]
    act = _vmm if settings["reboot"] == "vmm" else _os
    act(rekindle, guest, about, words, measured)


def _vmm(rekindle: Rekindle, guest: Subject, about: About, words: list[str], measured: Measured) -> None:
    """Replaces the QEMU under a guest: the client keeps its connections."""
    patience = "5s" if "cold" in words else "300s"
    options = ("--connections", str(about.connections), "--timeout", patience)
    with rekindle.probes([(guest.service_url, guest.netns)], *options, every=about.every) as probes:
        document = rekindle.call(*words)
        guest.wait_ready()
        time.sleep(about.settle_s)
    report = probes[0].report
    _, _, length_us = gap_around(report, None, None)
    measured.samples.append({"reboot": document, "client": report})
    measured.responses["downtime_s"] = length_us / 1e6
    measured.responses["failed_requests"] = measured.responses.get("failed_requests", 0.0) + failed_requests(report)


def _os(rekindle: Rekindle, guest: Subject, about: About, words: list[str], measured: Measured) -> None:
    """Reboots the guest's system. The client connects anew for each request, since a reboot kills connections."""
    ask_often(guest.netns)
    with PageClient(guest.netns, guest.address, guest.path) as client:
        client.wait(ANSWERS)
        time.sleep(UNDISTURBED_S)
        began_us = time.time_ns() // 1000
        document = rekindle.call(*words)
        client.wait(ANSWERS, after_host_us=max(began_us, document["resume_host_us"]))
        guest.wait_ready()
        time.sleep(about.settle_s)
    phase = document.get("phase") or {}
    if guest.phases and not phase.get("candidate"):
        raise RunError(f"{NAME}: it was booted, not resumed from a phase: {phase.get('skipped')}", measured=measured)
    gap = longest_gap(client.answers, began_us)
    at_ms = sorted((answer.host_us - began_us) // 1000 for answer in client.answers)
    seen = {"began_host_us": began_us, "answers_ms": at_ms, "first_us": gap.first_us}
    measured.samples.append({"reboot": document, "client": seen})
    measured.responses["downtime_s"] = gap.us / 1e6
