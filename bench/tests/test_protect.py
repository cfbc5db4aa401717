"""Topic `protect`: figures, tables and plots from invented rows."""

import json
from functools import partial

import pytest
import typer
from made_rows import write_rows
from typer.testing import CliRunner

from rekindle_bench.__main__ import main
from rekindle_bench.protect import TOPIC, analysis, rows
from rekindle_bench.protect.cases import dd
from rekindle_bench.protect.plan import FULL, QUICK, left_out
from rekindle_bench.protect.rows import Row

app = typer.Typer()
app.command()(main)

MIB = 1 << 20


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


def made_up(wrong=0, kept=0.26, slower=1.02):
    made = []
    for mib, ours in ((512, 2.0), (2048, 1.5)):
        made += [checkpoint("pause", "default", ours + i / 100, mib=mib) for i in range(8)]
        made += [checkpoint("pause", "basic", 40.0 + i, mib=mib) for i in range(8)]
        made += [save("background-snapshot", 4.0 + i / 100, mib) for i in range(8)]
        made += [save("full", 900.0 + i, mib) for i in range(2)]
    for every in (10.0, 5.0, 2.0, 1.0, 0.25):
        actual = kept if every == 0.25 else every
        for how, stopped in (("default", 2.0), ("cow", 3.0), ("basic", 50.0)):
            made += [checkpoint("intervals", how, stopped, every=every, interval=actual) for _ in range(4)]
            # A full checkpoint, and one after a small change: neither counts in the steady state.
            made.append(checkpoint("intervals", how, 900.0, every=every, full=1, interval=actual))
            made.append(
                checkpoint("intervals", how, stopped, every=every, interval=actual, compressed_bytes=100, bytes=90000)
            )
    made += [window("none", 20.0, case="intervals"), window("none", 22.0, case="intervals")]
    protected = {"case": "intervals", "every_s": 2.0, "store": "disk", "cpu_us": 1_050_000, "peak_kib": 51200}
    made.append(window("default", 21.42, checkpoints=10, **protected))
    for number in range(4):
        made.append(window("none", 20.0 + number / 10, round=number))
        made.append(window("default", (20.0 + number / 10) * slower, round=number))
        made += [window(how, 10.0, workload="transcode", round=number) for how in ("none", "default")]
    for number in range(5):
        made.append(checkpoint("commit", "default", 2.0, round=number, took_us=120_000 + number, interval_ms=None))
        made.append(
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
    made += [
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
    made += [checkpoint("rates", "cow", 1.0, rate_mb=50.0, workload="dirty") for _ in range(3)]
    return made


write = partial(write_rows, rows)


def figures_of(tmp_path, **changes):
    findings = analysis.figures(write(tmp_path / "protect-raw.csv", made_up(**changes)), "protect-raw.csv")
    assert findings.absent == []
    return {figure.id: figure for figure in findings.figures}


def test_known_rows_give_known_figures(tmp_path):
    """Medians of `made_up`: pauses of 2.035 and 1.535 ms against 4.035 ms of the peer; the larger ratio counts.

    At 2 s `default` pauses 2 ms, `cow` 3 ms and `basic` 50 ms. 10.5 MiB were written for 10 MiB of dirty pages.
    """
    figures = figures_of(tmp_path)
    assert set(figures) == {
        "pause_vs_background_snapshot",
        "pause_vs_basic",
        "bytes_vs_dirty",
        "commit_vs_dd",
        "interval_kept",
        "slowdown_2s",
        "slowdown_2s_transcoding",
        "pages_wrong_1000",
    }
    pause = figures["pause_vs_background_snapshot"].as_json()
    assert pause["value"] == pytest.approx(2.035 / 4.035, rel=1e-3)  # the worse of the two sizes
    assert pause["ratio_2G"] == pytest.approx(1.535 / 4.035, rel=1e-3)
    assert (pause["n"], pause["met"], pause["verdict"]) == (8, True, "better")
    basic = figures["pause_vs_basic"].as_json()
    assert (basic["value"], basic["ratio_default_2s"], basic["ratio_cow_2s"]) == (0.06, 0.04, 0.06)
    assert basic["ours_is"] == "cow, every 2 s"
    assert figures["bytes_vs_dirty"].value == pytest.approx(1.05)
    assert figures["bytes_vs_dirty"].n == 4
    assert figures["commit_vs_dd"].value == pytest.approx(1.2, rel=1e-4)
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
    """The window of 21.42 s is compared with the mean (21 s) of the windows before and after; it has 10 checkpoints."""
    (line,) = analysis.overheads(write(tmp_path / "r.csv", made_up()))
    assert line["overhead %"] == pytest.approx(2.0)  # against the mean of the windows before and after
    assert line["level %"] == pytest.approx(100 * 10 / 21.42)
    assert line["protector's CPU %"] == pytest.approx(105 / 21.42)
    assert line["peak MB"] == 50


def test_table_1_has_medians_of_steady_checkpoints(tmp_path):
    """4 usual checkpoints and a small one; the full one is left out."""
    line = next(line for line in analysis.table_1(write(tmp_path / "r.csv", made_up())) if line["every s"] == 2.0)
    assert (line["n"], line["actual s"], line["commit s"]) == (5, 2.0, 0.1)
    assert line["dirty MB"] == pytest.approx(30 * MIB / 1e6)


def test_an_analysis_again_gives_the_same_and_draws(tmp_path):
    """Resampling has a fixed seed, so the JSON is equal byte for byte."""
    raw = tmp_path / "raw" / "protect-raw.csv"
    raw.parent.mkdir()
    write(raw, made_up())
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
    """Each of the eight figures, two of them for either size or policy."""
    findings = analysis.figures(write(tmp_path / "r.csv", [save("full", 1.0)]), "r.csv")
    assert findings.figures == []
    assert len(findings.absent) == 10  # each of the eight, two of them for either size or policy


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
    assert set(TOPIC.cases) == {"pause", "commit", "wrong", "slowdown", "intervals", "rates"}


def test_dds_own_time_is_used(tmp_path):
    """`dd` copies less than the whole source, as for a checkpoint that is smaller than the prepared data."""
    (tmp_path / "from").write_bytes(bytes(5_000_000))
    us, length = dd(tmp_path / "from", tmp_path / "to", 4_500_000)
    assert length == 4_500_000
    assert (tmp_path / "to").stat().st_size == 4_500_000
    assert us > 0
