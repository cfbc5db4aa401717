"""Load for a guest's web server, and the results of the client: throughput and response time of a window.

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

from rekindle_lab.experiment.definition import Guest as About
from rekindle_lab.experiment.runner import RunError
from rekindle_lab.experiment.subject import Subject
from rekindle_lab.rekindle import Rekindle, failed_requests, last_json

SCRIPT = Path(__file__).with_name("wrk.lua")
PATIENCE_S = 10
"""Seconds after which wrk counts a missing answer as a timeout."""
MARGIN_S = 60.0
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


def measure(rekindle: Rekindle, guest: Subject, about: About, seconds: float) -> Window:
    """Puts the guest under load for `seconds`."""
    window = _wrk(guest, about, seconds) if about.load == "wrk" else _probe(rekindle, guest, about, seconds)
    if window.throughput_per_s <= 0:
        raise RunError(f"{guest.name}: no answer under load within {seconds:g} s")
    return window


def _probe(rekindle: Rekindle, guest: Subject, about: About, seconds: float) -> Window:
    options = ("--connections", str(about.connections))
    with rekindle.probes([(guest.service_url, guest.netns)], *options, every=about.every, margin_s=0.0) as probes:
        time.sleep(seconds)
    report = probes[0].report
    latency_us = report["latency"]["p50_us"] if report["latency"] else math.nan
    return Window(report["answered"] / (report["elapsed_us"] / 1e6), latency_us / 1e3, failed_requests(report), report)


def paths(guest: Subject, files: int) -> list[str]:
    """Returns paths of files of the guest's web server, which are the same in every run."""
    return [guest.path] if guest.kind == "micro" else [f"/files/{number:03}.bin" for number in range(files)]


def _wrk(guest: Subject, about: About, seconds: float) -> Window:
    command = ["ip", "netns", "exec", guest.netns, "wrk", "--threads", "1", "--connections", str(about.connections)]
    command += ["--duration", f"{math.ceil(seconds)}s", "--timeout", f"{PATIENCE_S}s", "--script", str(SCRIPT)]
    command += [f"http://{guest.address}/", "--", *paths(guest, about.files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + MARGIN_S, check=False)
    if done.returncode != 0:
        output = (done.stderr.strip() or done.stdout.strip())[-500:]
        raise RunError(f"wrk: exit status {done.returncode}: {output}", done.returncode)
    return of_wrk(done.stdout)


def of_wrk(output: str) -> Window:
    """Parses the output of wrk with the script `wrk.lua`."""
    try:
        report = last_json(output)
        failed = sum(report["failed"].values())
        good = report["requests"] - report["failed"]["status"]
        return Window(good / (report["duration_us"] / 1e6), report["latency"]["p50_us"] / 1e3, failed, {"wrk": report})
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RunError(f"wrk: its last line is not a result ({error!r}): {output[-500:]}") from error


@contextmanager
def without_caches(guest: Subject, every_s: float) -> Iterator[None]:
    """Makes the guest drop its page cache at an interval while the body runs, so that reads come from its disk."""
    if not every_s:
        yield
        return
    over = Event()
    failure: list[Exception] = []

    def drop() -> None:
        try:
            while not over.wait(every_s):
                reply = guest.command("drop-caches")
                if not reply.startswith("ok"):
                    raise RunError(f"{guest.name}: drop-caches: {reply}")
        except Exception as error:  # raised by the thread that waits for this one
            failure.append(error)

    thread = Thread(target=drop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failure:
        raise failure[0]
