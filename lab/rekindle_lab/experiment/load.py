"""Puts a guest's web server under load, and returns the client's results: throughput and response time of a window.

`probe` is Rekindle's own client, sends at a rate and keeps its connections. `wrk` sends as fast as it is answered, for
several files in turn.
"""

import math
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from rekindle_lab.experiment.definition import Guest as GuestSpec
from rekindle_lab.experiment.runner import RunError
from rekindle_lab.experiment.subject import Subject
from rekindle_lab.rekindle import Rekindle, failed_requests, last_json

WRK_SCRIPT = Path(__file__).with_name("wrk.lua")
WRK_TIMEOUT_S = 10
"""Seconds after which wrk counts a missing answer as a timeout."""
WRK_MARGIN_S = 60.0
"""Seconds that wrk may take longer than configured."""


@dataclass(frozen=True)
class Window:
    """Results of a client in one window, with the client's whole report."""

    throughput_per_s: float
    """Good answers per second."""
    response_time_ms: float
    """Median response time in ms."""
    failed: int
    raw: dict[str, Any]
    """The report of `rekindle probe`, or that of wrk at the key `wrk`."""


def measure(rekindle: Rekindle, guest: Subject, guest_spec: GuestSpec, seconds: float) -> Window:
    """Puts the guest under load for `seconds`."""
    window = (
        _run_wrk(guest, guest_spec, seconds)
        if guest_spec.load == "wrk"
        else _run_probe(rekindle, guest, guest_spec, seconds)
    )
    if window.throughput_per_s <= 0:
        raise RunError(f"{guest.name}: no answer under load within {seconds:g} s")
    return window


def _run_probe(rekindle: Rekindle, guest: Subject, guest_spec: GuestSpec, seconds: float) -> Window:
    options = ("--connections", str(guest_spec.connections))
    with rekindle.probes([(guest.service_url, guest.netns)], *options, every=guest_spec.every, margin_s=0.0) as probes:
        time.sleep(seconds)
    report = probes[0].report
    latency_us = report["latency"]["p50_us"] if report["latency"] else math.nan
    return Window(
        throughput_per_s=report["answered"] / (report["elapsed_us"] / 1e6),
        response_time_ms=latency_us / 1e3,
        failed=failed_requests(report),
        raw=report,
    )


def paths(guest: Subject, files: int) -> list[str]:
    """Returns paths of files of the guest's web server, which are the same in every run."""
    return [guest.path] if guest.kind == "micro" else [f"/files/{number:03}.bin" for number in range(files)]


def _run_wrk(guest: Subject, guest_spec: GuestSpec, seconds: float) -> Window:
    command = ["ip", "netns", "exec", guest.netns]
    command += ["wrk", "--threads", "1", "--connections", str(guest_spec.connections)]
    command += ["--duration", f"{math.ceil(seconds)}s", "--timeout", f"{WRK_TIMEOUT_S}s", "--script", str(WRK_SCRIPT)]
    command += [f"http://{guest.address}/", "--", *paths(guest, guest_spec.files)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=seconds + WRK_MARGIN_S, check=False)
    if completed.returncode != 0:
        output = (completed.stderr.strip() or completed.stdout.strip())[-500:]
        raise RunError(f"wrk: exit status {completed.returncode}: {output}", completed.returncode)
    return parse_wrk(completed.stdout)


def parse_wrk(output: str) -> Window:
    """Parses the output of wrk with the script `wrk.lua`."""
    try:
        report = last_json(output)
        good_answers = report["requests"] - report["failed"]["status"]
        return Window(
            throughput_per_s=good_answers / (report["duration_us"] / 1e6),
            response_time_ms=report["latency"]["p50_us"] / 1e3,
            failed=sum(report["failed"].values()),
            raw={"wrk": report},
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RunError(f"wrk: its last line is not a result ({error!r}): {output[-500:]}") from error


@contextmanager
def without_caches(guest: Subject, every_s: float) -> Iterator[None]:
    """Makes the guest drop its page cache at an interval while the body runs, so that reads come from its disk."""
    if not every_s:
        yield
        return
    body_ended = Event()
    failure: list[Exception] = []

    def drop_caches() -> None:
        try:
            while not body_ended.wait(every_s):
                reply = guest.command("drop-caches")
                if not reply.startswith("ok"):
                    raise RunError(f"{guest.name}: drop-caches: {reply}")
        except Exception as error:  # raised by the thread that waits for this one
            failure.append(error)

    thread = Thread(target=drop_caches, daemon=True)
    thread.start()
    try:
        yield
    finally:
        body_ended.set()
        thread.join()
    if failure:
        raise failure[0]
