"""Topic `protect`: figures, tables and plots from invented rows.

A protector saves a guest's memory to a store as checkpoints, and stops the guest for each: a pause. Its policies:
`basic` copies all dirty pages in the pause; `cow` later, each page before the guest changes it; `default`. QEMU's own
ways to save a guest, `background-snapshot` and `full`, are the peers.
"""

import json
from functools import partial

import pytest
import typer
from row_files import write_rows
from typer.testing import CliRunner

from rekindle_bench.__main__ import main
from rekindle_bench.protect import TOPIC, analysis, rows
from rekindle_bench.protect.cases import dd
from rekindle_bench.protect.plan import FULL, QUICK, left_out
from rekindle_bench.protect.rows import Row

app = typer.Typer()
app.command()(main)

MIB = 1 << 20
SAMPLES = 8
"""Pauses of each size and way; each is 0.01 ms longer than the one before."""
MEDIAN_STEP_MS = 0.01 * (SAMPLES - 1) / 2
PAUSE_MS = {512: 2.0, 2048: 1.5}
"""First pause of `default`, by MiB of RAM."""
PEER_PAUSE_MS = 4.0
INTERVAL_PAUSE_MS = {"default": 2.0, "cow": 3.0, "basic": 50.0}
"""Pause of each policy in the case `intervals`."""
UNPROTECTED_S, PROTECTED_S, WINDOW_CHECKPOINTS, PROTECTOR_CPU_S = (20.0, 22.0), 21.42, 10, 1.05
"""Windows of the case `intervals`: two without protection, and between them one with."""


def checkpoint(case, how, stopped_ms, *, mib=512, every=2.0, interval=None, round=0, **more):  # noqa: A002
    columns = {
        "full": 0,
        "interval_ms": int((every if interval is None else interval) * 1000),
        "dirty_bytes": 30 * MIB,
        "copied_stopped_bytes": 0,
        "compressed_bytes": 10 * MIB,
        "bytes": 10 * MIB + MIB // 2,
        "commit_us": 100_000,
        "took_us": 150_000,
        "workload": "compile",
        "store": "disk",
        **more,
    }
    return Row(
        case=case,
        what="checkpoint",
        memory_mib=mib,
        how=how,
        round=round,
        every_s=every,
        stopped_us=int(stopped_ms * 1000),
        **columns,
    )


def save(how, stopped_ms, mib=512):
    return Row(
        case="pause",
        what="save",
        memory_mib=mib,
        workload="compile",
        store="disk",
        how=how,
        round=0,
        stopped_us=int(stopped_ms * 1000),
    )


def window(how, seconds, *, case="slowdown", workload="compile", round=0, **more):  # noqa: A002
    return Row(
        case=case,
        what="window",
        memory_mib=512,
        workload=workload,
        store=more.pop("store", ""),
        how=how,
        round=round,
        window_us=int(seconds * 1e6),
        **more,
    )


def invented_rows(wrong=0, kept=0.26, slower=1.02):
    """`wrong`: wrong pages; `kept`: actual interval (s) for 0.25 s; `slower`: time of protected by unprotected work."""
    all_rows = []
    for mib, ours_ms in PAUSE_MS.items():
        all_rows += [checkpoint("pause", "default", ours_ms + i / 100, mib=mib) for i in range(SAMPLES)]
        all_rows += [checkpoint("pause", "basic", 40.0 + i, mib=mib) for i in range(SAMPLES)]
        all_rows += [save("background-snapshot", PEER_PAUSE_MS + i / 100, mib) for i in range(SAMPLES)]
        all_rows += [save("full", 900.0 + i, mib) for i in range(2)]
    for every in (10.0, 5.0, 2.0, 1.0, 0.25):
        actual = kept if every == 0.25 else every
        for how, stopped in INTERVAL_PAUSE_MS.items():
            all_rows += [checkpoint("intervals", how, stopped, every=every, interval=actual) for _ in range(4)]
            # A full checkpoint, and one after a small change: neither counts in the steady state.
            all_rows.append(checkpoint("intervals", how, 900.0, every=every, full=1, interval=actual))
            all_rows.append(
                checkpoint("intervals", how, stopped, every=every, interval=actual, compressed_bytes=100, bytes=90000)
            )
    all_rows += [window("none", seconds, case="intervals") for seconds in UNPROTECTED_S]
    costs = {"cpu_us": int(PROTECTOR_CPU_S * 1e6), "peak_kib": 50 * 1024, "checkpoints": WINDOW_CHECKPOINTS}
    all_rows.append(window("default", PROTECTED_S, case="intervals", every_s=2.0, store="disk", **costs))
    for number in range(4):
        all_rows.append(window("none", 20.0 + number / 10, round=number))
        all_rows.append(window("default", (20.0 + number / 10) * slower, round=number))
        all_rows += [window(how, 10.0, workload="transcode", round=number) for how in ("none", "default")]
    for number in range(5):
        all_rows.append(checkpoint("commit", "default", 2.0, round=number, took_us=120_000 + number, interval_ms=None))
        for store, pause_ms, took_us in (("disk", 2.0, 100_000), ("encrypted", 2.1, 125_000)):
            columns = {"store": store, "round": number, "took_us": took_us, "interval_ms": None}
            all_rows.append(checkpoint("encryption", "default", pause_ms, **columns))
        all_rows.append(
            Row(
                case="commit",
                what="dd",
                memory_mib=512,
                workload="dirty",
                store="disk",
                how="dd",
                round=number,
                took_us=100_000 + number,
                bytes=46_000_000,
            )
        )
    all_rows += [
        Row(
            case="wrong",
            what="compare",
            memory_mib=512,
            workload="compile",
            store="disk",
            how=how,
            round=0,
            checkpoints=n,
            pages=131072,
            written_since=9,
            wrong=w,
        )
        for how, n, w in (("default", 1000, wrong), ("cow", 100, 0))
    ]
    all_rows += [checkpoint("rates", "cow", 1.0, rate_mb=50.0, workload="dirty") for _ in range(3)]
    return all_rows


write = partial(write_rows, rows)


def figures_of(tmp_path, **changes):
    findings = analysis.figures(write(tmp_path / "protect-raw.csv", invented_rows(**changes)), "protect-raw.csv")
    assert findings.absent == []
    return {figure.id: figure for figure in findings.figures}


def test_known_rows_give_known_figures(tmp_path):
    """Of the two sizes of RAM, the one with the larger ratio counts. 10.5 MiB hold 10 MiB of compressed pages."""
    figures = figures_of(tmp_path)
    assert set(figures) == {
        "pause_vs_background_snapshot",
        "pause_vs_basic",
        "bytes_vs_dirty",
        "commit_vs_dd",
        "encrypt_cost_pause",
        "encrypt_cost_commit",
        "interval_kept",
        "slowdown_2s",
        "slowdown_2s_transcoding",
        "pages_wrong_1000",
    }
    pause = figures["pause_vs_background_snapshot"].as_json()
    peer_ms = PEER_PAUSE_MS + MEDIAN_STEP_MS
    assert pause["value"] == pytest.approx((PAUSE_MS[512] + MEDIAN_STEP_MS) / peer_ms, rel=1e-3)
    assert pause["ratio_2G"] == pytest.approx((PAUSE_MS[2048] + MEDIAN_STEP_MS) / peer_ms, rel=1e-3)
    assert (pause["n"], pause["met"], pause["verdict"]) == (SAMPLES, True, "better")
    basic = figures["pause_vs_basic"].as_json()
    of_default, of_cow = (INTERVAL_PAUSE_MS[how] / INTERVAL_PAUSE_MS["basic"] for how in ("default", "cow"))
    assert (basic["value"], basic["ratio_default_2s"], basic["ratio_cow_2s"]) == (of_cow, of_default, of_cow)
    assert basic["ours_is"] == "cow, every 2 s"
    assert figures["bytes_vs_dirty"].value == pytest.approx(10.5 / 10)
    assert figures["bytes_vs_dirty"].n == 4
    assert figures["commit_vs_dd"].value == pytest.approx(1.2, rel=1e-4)
    assert (figures["encrypt_cost_pause"].value, figures["encrypt_cost_commit"].value) == (1.05, 1.25)
    assert (figures["interval_kept"].value, figures["interval_kept"].met) == (0.25, True)
    assert figures["slowdown_2s"].value == pytest.approx(0.02)
    assert figures["slowdown_2s"].as_json()["slowdown_low"] <= 0.02 <= figures["slowdown_2s"].as_json()["slowdown_high"]
    assert figures["slowdown_2s_transcoding"].value == 0
    wrong = figures["pages_wrong_1000"].as_json()
    assert (wrong["value"], wrong["checkpoints"], wrong["pages_compared"], wrong["met"]) == (0, 1000, 131072, True)


@pytest.mark.parametrize(
    ("changes", "id_", "value"),
    [
        ({"wrong": 3}, "pages_wrong_1000", 3),
        ({"kept": 0.3}, "interval_kept", 1.0),
        ({"slower": 1.1}, "slowdown_2s", 0.1),
    ],
)
def test_a_missed_bar_is_reported(tmp_path, changes, id_, value):
    """An actual interval of 0.3 s is more than 5 % above 0.25 s, so 1 s is the smallest that was kept."""
    figure = figures_of(tmp_path, **changes)[id_]
    assert figure.value == pytest.approx(value)
    assert not figure.met


def test_overhead_and_level_of_protection(tmp_path):
    """Overhead is against the mean of the windows before and after; the level is checkpoints per 100 s."""
    (line,) = analysis.overheads(write(tmp_path / "r.csv", invented_rows()))
    unprotected_s = sum(UNPROTECTED_S) / 2
    assert line["overhead %"] == pytest.approx(100 * (PROTECTED_S / unprotected_s - 1))
    assert line["level %"] == pytest.approx(100 * WINDOW_CHECKPOINTS / PROTECTED_S)
    assert line["protector's CPU %"] == pytest.approx(100 * PROTECTOR_CPU_S / PROTECTED_S)
    assert line["peak MB"] == 50


def test_table_1_has_medians_of_steady_checkpoints(tmp_path):
    """4 usual checkpoints and a small one; the full one is left out."""
    line = next(line for line in analysis.table_1(write(tmp_path / "r.csv", invented_rows())) if line["every s"] == 2.0)
    assert (line["n"], line["actual s"], line["commit s"]) == (5, 2.0, 0.1)
    assert line["dirty MB"] == pytest.approx(30 * MIB / 1e6)


def test_an_analysis_again_gives_the_same_and_draws(tmp_path):
    """Resampling has a fixed seed, so the JSON is equal byte for byte."""
    raw = tmp_path / "raw" / "protect-raw.csv"
    raw.parent.mkdir()
    write(raw, invented_rows())
    outputs = []
    for name in ("one", "two"):
        result = CliRunner().invoke(app, ["protect", "--from-raw", str(raw), "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        outputs.append(result.output.splitlines()[-1])
        document = json.loads(outputs[-1])
        assert document["plots"] == ["protect-pause.png", "protect-figure2.png", "protect-figure3.png"]
        for plot in document["plots"]:
            assert (tmp_path / name / plot).read_bytes().startswith(b"\x89PNG")
    assert outputs[0] == outputs[1]
    page = (tmp_path / "one" / "protect.md").read_text()
    assert "| pages_wrong_1000 | 0 pages | == 0 | met |" in page
    assert "## Table I" in page


def test_missing_rows_are_reported(tmp_path):
    findings = analysis.figures(write(tmp_path / "r.csv", [save("full", 1.0)]), "r.csv")
    assert findings.figures == []
    assert len(findings.absent) == 12  # each of the ten, two of them for either size or policy


def test_omissions_of_a_quick_run_are_listed():
    """The full plan omits nothing."""
    assert left_out(FULL) == []
    text = "\n".join(left_out(QUICK))
    assert "pause at 8G: all of it" in text
    assert "intervals: 10 s, 5 s, 1 s" in text
    assert "checkpoints before memory is compared: 100 of 1000" in text
    assert "slowdown of transcode: 0 pairs of 10" in text


def test_only_cases_that_exist(tmp_path):
    """`sizes` is a case of another topic."""
    result = CliRunner().invoke(app, ["protect", "--only", "sizes", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert set(TOPIC.cases) == {"pause", "commit", "encryption", "wrong", "slowdown", "intervals", "rates"}


def test_dds_own_time_is_used(tmp_path):
    """`dd` copies less than the whole source, as for a checkpoint that is smaller than the prepared data."""
    (tmp_path / "from").write_bytes(bytes(5_000_000))
    us, length = dd(tmp_path / "from", tmp_path / "to", 4_500_000)
    assert length == 4_500_000
    assert (tmp_path / "to").stat().st_size == 4_500_000
    assert us > 0
