"""The report of an experiment, opened in a real browser (Debian's chromium, which scripts/setup installs).

The experiment is `invented_runs.campaign`: 32 runs of two levels and two responses, and here one failed attempt in
addition. Its report is a folder with the page (report.html), and its plots and tables as PNG and CSV.
"""

import csv
import gzip
import json
import shutil
from base64 import b64decode

import pytest
from invented_runs import campaign, line, order_json, write
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from rekindle_lab.analysis.judge import judge
from rekindle_lab.analysis.runs import Order, read
from rekindle_lab.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of the experiment, with its report."""
    folder = tmp_path_factory.mktemp("campaign")
    lines = campaign()
    failed = line(5, lines[4]["treatment"]["technique"], {}, outcome="failed", error='<b>no answer</b> & "gone"')
    lines[4]["attempt"] = 2
    write(folder / "runs.jsonl", [*lines[:4], failed, *lines[4:]])
    order_json(folder / "order.json", lines)
    document = json.loads((folder / "order.json").read_text())
    document |= {"question": "Is kexec faster?", "definition": {"name": "made-up"}}
    (folder / "order.json").write_text(json.dumps(document))
    result = CliRunner().invoke(app, ["report", str(folder / "runs.jsonl")])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(folder / "report" / "report.html")
    return folder


@pytest.fixture(scope="module")
def page(folder):
    """Returns the page in a browser; `messages` has its errors, `requested` the URLs that it has loaded."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("no chromium in PATH; run: scripts/setup")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        page.messages, page.requested = [], []
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url.split(",")[0]))
        page.goto((folder / "report" / "report.html").as_uri())
        yield page
        browser.close()


def test_it_is_self_contained_and_has_no_errors(page):
    """It loads only itself; plots and data are part of it, as data URLs."""
    assert page.messages == []
    assert {url.split(":")[0] for url in page.requested} <= {"file", "data"}
    assert len([url for url in page.requested if url.startswith("file")]) == 1


def test_its_plots_are_shown(page):
    images = page.locator("img")
    assert images.count() == 2
    for index in range(2):
        own_width, shown_width = images.nth(index).evaluate("image => [image.naturalWidth, image.clientWidth]")
        assert own_width > 1000 and 500 < shown_width <= 1000


def test_it_states_the_results(page):
    text = page.locator("body").inner_text()
    for words in (
        "Is kexec faster?",
        "32 of 32 runs done, 1 failed attempts",
        "One-way ANOVA",
        "T crit",
        "rekindle 0.1.0",
    ):
        assert words in text, words
    verdict = page.locator("table").first.locator("tbody tr").first.inner_text()
    assert verdict.startswith("downtime (s)") and verdict.endswith("yes")


def test_nothing_overflows(page):
    for width in (1000, 400):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_failed_run_is_listed_and_its_text_is_not_markup(page):
    row = page.locator("#runs tr.failed")
    assert row.count() == 1
    assert '<b>no answer</b> & "gone"' in row.inner_text()


def test_runs_can_be_sorted(page):
    head = page.locator("#runs th", has_text="downtime_s")
    column = head.evaluate("head => head.cellIndex")

    def values():
        cells = page.locator("#runs tbody tr").evaluate_all(f"rows => rows.map(r => r.cells[{column}].textContent)")
        return [float(cell) for cell in cells if cell]

    before = values()
    head.click()
    assert values() == sorted(before) != before
    head.click()
    assert values() == sorted(before, reverse=True)


def test_raw_data_is_in_the_page(page, folder):
    """The links for the download have the whole runs.jsonl, packed, and all attempts as CSV."""
    whole = page.locator("#jsonl").get_attribute("href").split(",", 1)[1]
    assert gzip.decompress(b64decode(whole)) == (folder / "runs.jsonl").read_bytes()
    table = b64decode(page.locator("#csv").get_attribute("href").split(",", 1)[1]).decode()
    rows = list(csv.DictReader(table.splitlines()))
    assert len(rows) == 33  # 32 runs and the failed attempt
    first = json.loads((folder / "runs.jsonl").read_text().splitlines()[0])
    assert float(rows[0]["downtime_s"]) == first["responses"]["downtime_s"]


def test_its_folder_has_plots_and_tables(folder):
    report = folder / "report"
    assert (report / "downtime_s.png").read_bytes().startswith(b"\x89PNG")
    head, *rows = csv.reader((report / "downtime_s-one-way-anova.csv").read_text().splitlines())
    assert head == ["Source", "df", "SS", "MS", "F", "P-value", "F crit"]
    assert [row[0] for row in rows] == ["technique", "error", "total"]
    assert (report / "runs.csv").exists()


def test_its_tables_are_numbers_with_all_their_digits(folder):
    report = folder / "report"
    runs = read(folder / "runs.jsonl", order=Order.load(folder / "order.json"))
    downtime, throughput = judge(runs)
    rows = list(csv.DictReader((report / "verdicts.csv").read_text().splitlines()))
    for row, verdict in zip(rows, (downtime, throughput), strict=True):
        omega = verdict.response.effects.omega_squared
        assert [float(row[name]) for name in ("P-value", "Holm")] == [verdict.response.p, verdict.p_holm]
        assert [float(row[name]) for name in ("omega²", "omega² low", "omega² high")] == [*vars(omega).values()]
    (row,) = csv.DictReader((report / "downtime_s-differences.csv").read_text().splitlines())
    (pair,) = downtime.response.effects.pairs
    intervals = {"difference": pair.difference, "relative": pair.relative, "Hedges' g": pair.hedges_g}
    for name, interval in intervals.items():
        columns = [float(row[name + end]) for end in ("", " low", " high")]
        assert columns == [interval.value, interval.low, interval.high]
    *_, total = csv.DictReader((report / "downtime_s-one-way-anova.csv").read_text().splitlines())
    assert total["P-value"] == ""  # only factor and blocks are tested


def test_it_is_replaced(folder):
    report = folder / "report"
    before = (report / "report.html").read_text()
    (report / "stray").touch()
    assert CliRunner().invoke(app, ["report", str(folder / "runs.jsonl")]).exit_code == 0
    assert not (report / "stray").exists()
    assert (report / "report.html").read_text() == before
    assert {path.name for path in folder.iterdir()} == {"order.json", "report", "runs.jsonl"}


def test_it_is_published_with_its_input(folder, tmp_path):
    published = tmp_path / "results" / "made-up"
    published.mkdir(parents=True)
    (published / "stray").touch()
    (published / "results.md").touch()
    arguments = ["report", str(folder / "runs.jsonl"), "--publish", str(published), "--made-by", "make campaign NAME=x"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert {path.name for path in published.iterdir()} == {"results.md", "order.json", "runs.jsonl.gz"}
    assert gzip.decompress((published / "runs.jsonl.gz").read_bytes()) == (folder / "runs.jsonl").read_bytes()
    text = (published / "results.md").read_text()
    for words in (
        "# Campaign `made-up`: measured",
        "Is kexec faster?",
        "Made by `make campaign NAME=x`, on: rekindle rekindle 0.1.0.",
        "32 of 32 runs done (",
        "1 failed attempts",
        "## Averages, as the paper's tables 6 and 7",
        "### One-way ANOVA, as the paper's tables 3, 5b, 8, 9 and 11",
        "### Welch's test, as the paper's tables 4, 5a and 10",
        "`rekindle-lab report runs.jsonl.gz --out page`",
    ):
        assert words in text, words


def test_published_runs_can_be_analysed_again(folder, tmp_path):
    """Packed runs give the same analysis; a truncated pack is rejected."""
    packed = tmp_path / "runs.jsonl.gz"
    packed.write_bytes(gzip.compress((folder / "runs.jsonl").read_bytes()))
    (tmp_path / "order.json").write_bytes((folder / "order.json").read_bytes())
    answers = [CliRunner().invoke(app, ["analyse", str(runs)]) for runs in (folder / "runs.jsonl", packed)]
    assert answers[0].output == answers[1].output
    result = CliRunner().invoke(app, ["report", str(packed), "--out", str(tmp_path / "again")])
    assert result.exit_code == 0, result.output
    packed.write_bytes(packed.read_bytes()[:100])
    result = CliRunner().invoke(app, ["analyse", str(packed)])
    assert result.exit_code == 2 and "cannot be read" in result.output


@pytest.mark.parametrize("option", ["--out", "--publish"])
def test_a_folder_with_other_content_is_not_replaced(folder, tmp_path, option):
    (tmp_path / "mine").touch()
    result = CliRunner().invoke(app, ["report", str(folder / "runs.jsonl"), option, str(tmp_path)])
    assert result.exit_code != 0
    assert "is not empty and has no" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
