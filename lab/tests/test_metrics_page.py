"""The page of `rekindle metrics`, opened in a real browser with invented guests.

`scripts/test lab` sets the binary. Times are measured and printed, not checked.
"""

import json
import os
import shutil
import statistics
import time

import pytest

from rekindle_lab.invented_host import InventedHost
from rekindle_lab.metrics_page import DESKTOP, Server, chromium, load, new_page

BINARY = os.environ.get("REKINDLE_TEST_BINARY")
SCREENSHOTS = os.environ.get("REKINDLE_TEST_SCREENSHOTS")
"""A folder for pictures of the page, if they are wanted."""
PHONE = {"width": 390, "height": 844}

pytestmark = pytest.mark.skipif(
    BINARY is None, reason="REKINDLE_TEST_BINARY names no rekindle; scripts/test lab sets it"
)

FOCUSED = """(() => {
  const {id, name, value, textContent, nextElementSibling} = document.activeElement;
  const outlined = [document.activeElement, nextElementSibling].filter((element) => element !== null);
  return [[id, name, value, textContent].join(" "), outlined.map((element) => getComputedStyle(element).outlineStyle)];
})()"""
"""What has the focus, and whether it or the label after it is outlined."""


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def host(tmp_path):
    with InventedHost(tmp_path / "run") as host:
        yield host


@pytest.fixture
def server(host):
    with Server(BINARY, host.folder) as server:
        yield server


@pytest.fixture
def open_page(browser, server):
    """Opens the page. At the end of a test, none of its pages may have had an error or a violation of its policy."""
    pages = []

    def open_page(size=DESKTOP, **options):
        page = new_page(browser, size, **options)
        page.messages, page.requested = [], []
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url))
        load(page, server.url)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        assert page.messages == []
        assert page.evaluate("seen.violations") == []
        assert {url for url in page.requested if not url.startswith("data:")} == {server.url, server.url + "events"}
        page.context.close()


def row(page, name):
    return page.locator("#rows tr", has=page.get_by_role("button", name=name, exact=True))


def names(page):
    return page.locator("#rows tr:visible .name").all_text_contents()


def picture(page, name):
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")


def test_each_guest_has_a_row_and_names_are_not_markup(host, open_page):
    host.add("<img src=x onerror=alert(1)>", 1000).commit(4_200)
    host.add("plain")
    replaced = host.add("replaced", 2000)
    replaced.commit(12_000)
    replaced.replace_qemu(minutes_ago=30, operation="replace-qemu <b>--how warm</b>")
    page = open_page()
    assert page.locator("#rows tr").count() == 3
    first = row(page, "<img src=x onerror=alert(1)>")
    assert "running" in first.text_content() and "protected" in first.text_content()
    assert "not protected" in row(page, "plain").text_content()
    text = row(page, "replaced").text_content()
    for part in ("QEMU 10.0.2", "every 2 s", "replace-qemu <b>--how warm</b>", "stopped 18 ms", "30 min ago"):
        assert part in text, part
    assert page.locator("#rows img, #rows b").count() == 0
    assert page.locator("#rows svg.phases rect").count() == 9


def test_changes_arrive_without_a_reload(host, open_page):
    web = host.add("web", 1000)
    web.commit(4_000)
    page = open_page()
    assert page.locator("#connection-text").inner_text() == "Live"
    web.commit(7_000)
    row(page, "web").locator(".pause").get_by_text("7 ms").wait_for()
    assert "#2" in row(page, "web").text_content()
    assert row(page, "web").locator(".line").get_attribute("d").startswith("M")
    web.commit(4_000, age_ms=60_000)
    row(page, "web").get_by_text("overdue", exact=True).wait_for()
    assert page.locator("#news").text_content() == "web: overdue"
    assert page.title().startswith("(1) Rekindle")
    host.add("db")
    row(page, "db").wait_for()
    web.replace_qemu()
    row(page, "web").get_by_text("stopped 18 ms").wait_for()
    shutil.rmtree(host.folder / "db")
    row(page, "db").wait_for(state="detached")
    assert "1" in page.locator("#count-all").inner_text()


def test_it_is_usable_by_keyboard(host, open_page):
    for name in ("alpha", "beta", "gamma"):
        host.add(name, 1000).commit(5_000)
    host.guests["beta"].replace_qemu()
    page = open_page()
    focused = "document.activeElement"
    reached = []
    for _ in range(16):
        page.keyboard.press("Tab")
        shown, outlines = page.evaluate(FOCUSED)
        reached.append(shown)
        # The focus can be seen.
        assert any(style != "none" for style in outlines), shown
        if "alpha" in shown:
            break
    for part in ("Skip to the guests", "all", "search", "Guest", "Newest checkpoint", "alpha"):
        assert any(part in shown for shown in reached), (part, reached)
    page.keyboard.press("ArrowDown")
    assert page.evaluate(f"{focused}.textContent") == "beta"
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_role("heading", name="beta").is_visible()
    assert "save devices" in dialog.inner_text() and "It stopped the guest for 18 ms." in dialog.inner_text()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert page.evaluate(f"{focused}.textContent") == "beta"
    page.get_by_role("button", name="Guest", exact=True).press("Enter")
    page.get_by_role("button", name="Guest", exact=True).press("Enter")
    assert names(page) == ["gamma", "beta", "alpha"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"


def test_screen_readers_find_a_table_and_states_have_texts(host, open_page):
    host.add("web", 1000).commit(5_000)
    for size in (DESKTOP, PHONE):
        page = open_page(size)
        assert page.get_by_role("table", name="Guests of this host").count() == 1
        for name in ("Guest", "State", "Protection", "Newest checkpoint", "Pause", "Last operation"):
            assert page.get_by_role("columnheader", name=name, exact=True).count() == 1, name
        assert page.get_by_role("rowheader").count() == 1
        assert page.locator("#rows").get_by_role("cell").count() == 5
        assert page.get_by_role("status").count() == 2
        badges = page.locator(".badge").all_text_contents()
        assert all(len(badge) > 2 for badge in badges), badges


def test_guests_can_be_filtered(host, open_page):
    host.populate(30)
    page = open_page()
    page.get_by_label("Not protected").check()
    texts = page.locator("#rows tr:visible").all_text_contents()
    assert texts and all("not protected" in text or "protector ended" in text for text in texts)
    page.get_by_label("All").check()
    page.get_by_label("Name contains").fill("DB-0")
    assert names(page) and all(name.startswith("db-0") for name in names(page))
    page.get_by_label("Name contains").fill("no such guest")
    assert names(page) == [] and page.get_by_text("No guest matches the filter.").is_visible()


def test_a_host_without_guests(open_page):
    page = open_page()
    assert page.get_by_text("No guests run on this host.").is_visible()


def test_nothing_overflows(host, open_page):
    host.populate(30)
    host.add("a-name-without-a-place-to-break-" + "x" * 150, 1000).commit(4_000)
    for width in (1360, 1000, 800, PHONE["width"], 320):
        size = {"width": width, "height": 800}
        page = open_page(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], size
        page.locator(".name").first.click()
        dialog = page.get_by_role("dialog")
        assert dialog.evaluate("dialog => dialog.scrollWidth <= dialog.clientWidth"), size
        page.keyboard.press("Escape")


def test_a_lost_connection_is_shown_and_ends(host, server, open_page):
    host.add("gone")
    host.add("web", 1000).commit(5_000)
    page = open_page()
    address = server.url.removeprefix("http://").removesuffix("/")
    row(page, "web").locator(".name").focus()
    server.end()
    page.get_by_text("Connection lost").wait_for()
    shutil.rmtree(host.folder / "gone")
    server.start(address)
    page.get_by_text("Live", exact=True).wait_for()
    page.wait_for_selector("#guests[aria-busy=false]")
    assert names(page) == ["web"]
    # The row is the same, so that the focus is not lost.
    assert page.evaluate("document.activeElement.textContent") == "web"
    # The browser reports the attempts while there is no server.
    assert all("ERR_" in message for message in page.messages)
    page.messages.clear()


def test_two_hundred_guests(host, open_page):
    """Measures and prints: time until the page can be used and is complete, frames while all guests change."""
    host.populate(200)
    with host.protecting(0.5):
        page = open_page()
        assert page.locator("#rows tr").count() == 200
        marks = page.evaluate(
            "performance.getEntriesByType('mark').map((mark) => [mark.name.replace('rekindle-', ''), mark.startTime])"
        )
        first = page.evaluate("window.seen.frames.splice(0)")
        for _ in range(10):
            page.mouse.wheel(0, 700)
            time.sleep(0.5)
        page.mouse.wheel(0, -9000)
        page.locator(".name").first.click()
        time.sleep(2)
        live = page.evaluate("window.seen.frames")
        tasks = page.evaluate("window.seen.longTasks")
        ready = page.evaluate("window.seen.readyMs")
    figures = {name: round(ms) for name, ms in marks} | {"drawn": round(ready)}
    figures |= {"worst frame at the start": round(max(first)), "worst frame later": round(max(live))}
    figures |= {"median frame": round(statistics.median(live), 1), "tasks above 50 ms": [round(ms) for ms in tasks]}
    print("\n200 guests, ms:", json.dumps(figures))
    picture(page, "details")


@pytest.mark.skipif(SCREENSHOTS is None, reason="REKINDLE_TEST_SCREENSHOTS names no folder")
def test_pictures(host, open_page):
    host.populate(40)
    for guest in host.guests.values():
        guest.replace_qemu(minutes_ago=90)
    pages = {}
    for scheme in ("light", "dark"):
        for name, size in (("desktop", DESKTOP), ("tablet", {"width": 820, "height": 1000}), ("phone", PHONE)):
            pages[f"{name}-{scheme}"] = open_page(size, color_scheme=scheme)
    for second in range(40):
        for index, guest in enumerate(host.guests.values()):
            if "protection.lock" in guest.locks and (second + index) % (1 + index % 4) == 0 and index % 41 != 5:
                guest.commit(3_000 + 977 * ((guest.number + index) % 7) + index * 50)
        time.sleep(0.5)
    for name, page in pages.items():
        picture(page, name)
        page.locator(".name").nth(6).click()
        picture(page, f"{name}-details")
