"""The server and the page of `rekindle metrics`: started for a folder of run directories, opened in Chromium.

The browser needs playwright, which `lab/setup` installs (extra `dev`).
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DESKTOP = {"width": 1360, "height": 860}

OBSERVE = """
window.seen = {violations: [], frames: [], longTasks: [], readyMs: null};
document.addEventListener("securitypolicyviolation", (event) => window.seen.violations.push(event.violatedDirective));
new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.seen.longTasks.push(entry.duration)))
  .observe({type: "longtask", buffered: true});
let last = null;
const frame = (now) => {
  if (last !== null) window.seen.frames.push(now - last);
  last = now;
  requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
new PerformanceObserver((list, observer) => {
  if (!performance.getEntriesByName("rekindle-complete").length) return;
  if (!performance.getEntriesByName("rekindle-interactive").length) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => window.seen.readyMs = performance.now(), 0));
}).observe({type: "mark", buffered: true});
"""
"""Runs before the page's script, outside of its policy: records violations, frames, and when the page is complete.

`readyMs` is the time since the navigation when the frame is drawn after the page can be used and has all rows.
"""


class Server:
    """`rekindle metrics` for a folder of run directories. Ended by `with` or `end`."""

    def __init__(self, binary: str | Path, folder: Path) -> None:
        """Starts it on a free port."""
        self._binary, self._folder = binary, folder
        self.start("127.0.0.1:0")

    def start(self, address: str) -> None:
        """Starts it at an address, after `end`."""
        environment = {**os.environ, "REKINDLE_RUN_DIR": str(self._folder)}
        command = [self._binary, "metrics", "--listen", address, "--json"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url: str = json.loads(self.process.stdout.readline())["url"].removesuffix("metrics")
        """Of the page; that of the metrics is `metrics` below it."""

    def end(self) -> None:
        """Ends it."""
        self.process.terminate()
        self.process.communicate()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Runs Chromium without a window."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError("no chromium in PATH; run: scripts/setup")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def new_page(browser: "Browser", size: dict[str, int] = DESKTOP, **options: Any) -> "Page":  # noqa: ANN401
    """Makes an empty page with its own cache, whose documents run `OBSERVE`. `options`: of the browser's context."""
    page = browser.new_context(viewport=size, **options).new_page()
    page.add_init_script(OBSERVE)
    return page


def load(page: "Page", url: str) -> None:
    """Loads the page of `rekindle metrics`, and waits until it has all rows."""
    page.goto(url)
    page.wait_for_selector("#guests[aria-busy=false]")
