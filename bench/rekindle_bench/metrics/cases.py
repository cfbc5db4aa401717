"""The cases of `rekindle metrics`, listed in `CASES` at the end.

The guests are invented (`rekindle_lab.invented_host`): no QEMU runs. The process that writes their files and the
browser use this machine's processors, too.
"""

import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle_bench.case import NoRoomError
from rekindle_bench.environment import Environment, Setup
from rekindle_lab.invented_host import InventedHost
from rekindle_lab.metrics_page import Server, chromium, load, new_page
from rekindle_lab.rekindle import RekindleError

from .plan import Plan
from .rows import Row

ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
"""What Prometheus 3 sends."""
SCRAPE_TIMEOUT_S = 10.0
"""Prometheus' default."""
READY_TIMEOUT_MS = 60_000.0
SETTLE_S = 2.0
"""Time after a load of the page before it is scrolled."""
WHEEL_PX = 240
WHEEL_EVERY_MS = 100


@contextmanager
def environment(setup: Setup) -> Iterator[Environment]:
    """Sets up the environment: only folders."""
    with setup.workspace(namespaces=()) as space:
        yield setup.environment(Environment, space)


@contextmanager
def _served(env: Environment, guests: int, *, all_change: bool = False) -> Iterator[tuple[InventedHost, Server]]:
    """Runs `rekindle metrics` on a host whose protected guests commit every second. `all_change`: see `protecting`."""
    folder = env.work / "metrics"
    try:
        with InventedHost(folder) as host:
            host.populate(guests)
            with Server(env.rekindle.binary, folder) as server, host.protecting(all_change=all_change):
                yield host, server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_chromium() -> None:
    if shutil.which("chromium") is None:
        raise NoRoomError("has no chromium")


def _checkpoints(host: InventedHost) -> int:
    return sum(guest.number for guest in host.guests.values())


def _processor_us(pid: int) -> int:
    """Returns the processor time of a process: of all its threads, also of those that have ended."""
    # The clock that clock_getcpuclockid(3) returns, which Python does not have.
    return time.clock_gettime_ns((~pid << 3) | 2) // 1000


def _scrape(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=SCRAPE_TIMEOUT_S) as answer:
        return answer.read()


def cost(env: Environment, plan: Plan) -> None:
    """Measures the processor time of the server while it is scraped."""
    with _served(env, plan.guests) as (host, server):
        url = server.url + "metrics"
        answer = _scrape(url).decode()
        missing = [name for name in host.guests if f'vm="{name}"' not in answer]
        if missing or not answer.endswith("# EOF\n"):
            raise RekindleError(f"{url}: no OpenMetrics of all guests; missing: {', '.join(missing)}")
        for number in range(plan.cost_windows):
            env.log(f"cost: window {number + 1} of {plan.cost_windows}")
            begin_s, begin_cpu_us = time.monotonic(), _processor_us(server.process.pid)
            begin_checkpoints, scrapes, size = _checkpoints(host), 0, 0
            while scrapes * plan.scrape_s < plan.cost_s:
                time.sleep(max(0.0, begin_s + scrapes * plan.scrape_s - time.monotonic()))
                size = len(_scrape(url))
                scrapes += 1
            time.sleep(max(0.0, begin_s + plan.cost_s - time.monotonic()))
            row = Row(case="cost", round=number, guests=plan.guests, scrapes=scrapes, bytes=size)
            row.cpu_us = _processor_us(server.process.pid) - begin_cpu_us
            row.window_us = round((time.monotonic() - begin_s) * 1e6)
            row.checkpoints = _checkpoints(host) - begin_checkpoints
            env.rows.append(row)


def page_load(env: Environment, plan: Plan) -> None:
    """Loads the page with an empty cache, and measures until it can be used and shows all guests."""
    _require_chromium()
    with _served(env, plan.guests) as (_, server), chromium() as browser:
        for number in range(plan.loads):
            env.log(f"load: {number + 1} of {plan.loads}")
            page = new_page(browser)
            load(page, server.url)
            page.wait_for_function("window.seen.readyMs !== null", timeout=READY_TIMEOUT_MS)
            shown = page.locator("#rows tr:visible").count()
            if shown != plan.guests:
                raise RekindleError(f"{server.url} shows {shown} guests of {plan.guests}")
            marks = "performance.getEntriesByType('mark').map((mark) => [mark.name, mark.startTime])"
            marks_ms = dict(page.evaluate(marks))
            row = Row(case="load", round=number, guests=plan.guests)
            row.interactive_us = round(marks_ms["rekindle-interactive"] * 1e3)
            row.complete_us = round(marks_ms["rekindle-complete"] * 1e3)
            row.ready_us = round(page.evaluate("window.seen.readyMs") * 1e3)
            env.rows.append(row)
            page.context.close()


def frames(env: Environment, plan: Plan) -> None:
    """Scrolls the page down and up again while all guests change, and measures the time between frames."""
    _require_chromium()
    with _served(env, plan.guests, all_change=True) as (host, server), chromium() as browser:
        page = new_page(browser)
        load(page, server.url)
        page.mouse.move(600, 500)
        page.wait_for_timeout(SETTLE_S * 1e3)
        for number in range(plan.frame_windows):
            env.log(f"frames: window {number + 1} of {plan.frame_windows}")
            begin_s, begin_checkpoints = time.monotonic(), _checkpoints(host)
            page.evaluate("window.seen.frames.splice(0)")
            while (since_s := time.monotonic() - begin_s) < plan.frames_s:
                page.mouse.wheel(0, WHEEL_PX if since_s < plan.frames_s / 2 else -WHEEL_PX)
                page.wait_for_timeout(WHEEL_EVERY_MS)
            between_ms = page.evaluate("window.seen.frames.splice(0)")
            row = Row(case="frames", round=number, guests=plan.guests)
            row.window_us = round((time.monotonic() - begin_s) * 1e6)
            row.checkpoints = _checkpoints(host) - begin_checkpoints
            row.frames_us = [round(ms * 1e3) for ms in between_ms]
            if not row.frames_us:
                raise RekindleError(f"{server.url}: no frame in {plan.frames_s:g} s")
            env.rows.append(row)


CASES: dict[str, Callable[[Environment, Plan], None]] = {
    "cost": cost,
    "load": page_load,
    "frames": frames,
}
