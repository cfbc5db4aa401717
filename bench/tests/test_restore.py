"""Topic `restore`: figures, tables and plots from invented rows.

Ways to restore a guest from a checkpoint: `lazy` (memory is loaded on demand while the guest runs), `eager` (before it
runs), `prepared` (lazy, by a QEMU that was started in advance), and QEMU's own `incoming` as the peer.
"""

import json
from functools import partial

import pytest
import typer
from row_files import write_rows
from typer.testing import CliRunner

from invented_record import steps
from rekindle_bench.__main__ import main
from rekindle_bench.restore import analysis, rows
from rekindle_bench.restore.plan import FULL, QUICK, left_out
from rekindle_bench.restore.rows import Row

app = typer.Typer()
app.command()(main)

STEPS = steps([("prepare", "start QEMU", 0, 40), ("renew", "load its devices", 40, 20), ("settle", "record", 60, 500)])


def restored(case, how, ms, number, *, mib=512, store="disk", **more):
    """Returns a row of a restore that takes `ms` until the guest runs."""
    columns = {"restore_us": int(ms * 1000), "fill_us": 2_000_000, "steps": STEPS, **more}
    return Row(
        case=case, what="restore", memory_mib=mib, workload="compile", store=store, how=how, round=number, **columns
    )


def window(case, how, number, *, store="disk", **more):
    """Returns a row of a piece of work; `digest` is that of its result."""
    key = {"case": case, "what": "window", "memory_mib": 512, "workload": "compile", "store": store, "how": how}
    return Row(round=number, units=100, **key, **more)


def invented_rows(slower=1.03, digest="aa"):
    """`slower`: time of the second half of the work after a restore, by its time without; `digest`: its result."""
    all_rows = [restored("restore", "lazy", 80.0 + i, i) for i in range(9)]
    all_rows += [restored("restore", "lazy", 88.0 + i, i, mib=8192) for i in range(9)]
    all_rows += [restored("restore", "eager", 900.0, i) for i in range(3)]
    all_rows += [restored("restore", "incoming", 1000.0 + i, i, fill_us=None) for i in range(3)]
    all_rows += [restored("prepared", "prepared", 15.0, i, resident_kib=50 * 1024) for i in range(3)]
    all_rows += [restored("prepared", "lazy", 90.0, i) for i in range(3)]
    all_rows += [restored("stores", "lazy", 120.0, i, store="s3") for i in range(2)]
    for number in range(4):
        rest_us = (20 + number) * 1_000_000
        all_rows.append(window("after", "undisturbed", number, rest_us=rest_us, digest="aa"))
        all_rows.append(window("after", "lazy", number, rest_us=int(rest_us * slower), digest=digest))
        pages = {"demanded_pages": 1000, "filled_pages": 5000, "worst_us": 3000 + number}
        all_rows.append(restored("after", "lazy", 85.0, number, **pages))
    return all_rows


write = partial(write_rows, rows)


def test_known_rows_give_known_figures(tmp_path):
    """Medians of `invented_rows`: 84 ms of 80 to 88 ms, 92 ms with 8G, 1001 ms for the peer. Work takes 3 % longer."""
    findings = analysis.figures(write(tmp_path / "r.csv", invented_rows()), "r.csv")
    assert findings.absent == ["figure slowdown_after_restore_transcoding: no rows"]
    by_id = {figure.id: figure for figure in findings.figures}
    small = by_id["restore_ms_512m"].as_json()
    assert (small["value"], small["unit"], small["n"], small["met"], small["verdict"]) == (84, "ms", 9, True, "better")
    assert small["ratio_of"] == {"ours": 84, "peer": 1001}
    assert by_id["restore_8g_vs_512m"].value == pytest.approx(92 / 84)
    prepared = by_id["restore_prepared_ms"].as_json()
    assert (prepared["value"], prepared["ratio_of"]["peer"], prepared["met"]) == (15, 90, True)
    assert (by_id["restore_prepared_mb"].value, by_id["restore_prepared_mb"].met) == (50, True)
    after = by_id["slowdown_after_restore"]
    assert after.value == pytest.approx(0.03)
    assert after.met


def test_a_slow_second_half_misses(tmp_path):
    """20 % longer than undisturbed; the bar is 4 %."""
    findings = analysis.figures(write(tmp_path / "r.csv", invented_rows(slower=1.2)), "r.csv")
    after = next(figure for figure in findings.figures if figure.id == "slowdown_after_restore")
    assert after.value == pytest.approx(0.2)
    assert not after.met


def test_table_2(tmp_path):
    """1000 pages of 4096 bytes on demand; the longest wait of 3.000 to 3.003 ms. Another digest is another result."""
    (line,) = analysis.table_2(write(tmp_path / "r.csv", invented_rows()))
    assert line["overhead %"] == pytest.approx(3.0)
    assert line["fetched on demand MB"] == pytest.approx(4.096)
    assert line["longest wait ms"] == pytest.approx(3.003)
    assert line["results equal"] == "4 of 4"
    (line,) = analysis.table_2(write(tmp_path / "s.csv", invented_rows(digest="bb")))
    assert line["results equal"] == "0 of 4"


def moved(libvirt_digest):
    """Returns restores on another host, of a guest of Rekindle and of libvirt, with the results of their work."""
    all_rows = []
    for number, (how, digest) in enumerate((("elsewhere", "aa"), ("libvirt", libvirt_digest))):
        all_rows.append(restored("elsewhere", how, 120.0 + number, number, store="s3", lost_us=400_000))
        all_rows.append(window("elsewhere", "undisturbed", number, store="s3", digest="aa"))
        all_rows.append(window("elsewhere", how, number, store="s3", digest=digest))
    return all_rows


def test_work_continued_elsewhere_is_compared(tmp_path):
    """The guest of libvirt gives another result in the second file. These rows do not change the figures."""
    first, second = analysis.moves(write(tmp_path / "r.csv", invented_rows() + moved("aa")))
    assert (first["guest of"], first["results"], first["equal"]) == ("Rekindle", 2, "yes")
    assert (second["guest of"], second["restored in ms"], second["work lost ms"]) == ("libvirt", 121, 400)
    assert second["equal"] == "yes"
    other = analysis.moves(write(tmp_path / "s.csv", invented_rows() + moved("bb")))
    assert [line["equal"] for line in other] == ["yes", "no"]
    findings = analysis.figures(write(tmp_path / "t.csv", invented_rows() + moved("aa")), "t.csv")
    alone = analysis.figures(write(tmp_path / "u.csv", invented_rows()), "u.csv")
    assert [figure.value for figure in findings.figures] == [figure.value for figure in alone.figures]


def test_figure_4_adds_up(tmp_path):
    """84 ms from the command, of which the steps take 40 and 20 ms; `settle` is after the guest runs."""
    parts = analysis.steps(write(tmp_path / "r.csv", invented_rows()))
    assert next(iter(parts)) == ("512M", "lazy")
    assert parts["512M", "lazy"] == {"start QEMU": 40, "load its devices": 20, "the rest": 24}
    assert ("512M, disk", "prepared") in parts
    assert ("512M, s3", "lazy") in parts


def test_an_analysis_again_gives_the_same_and_draws(tmp_path):
    """Resampling has a fixed seed, so the JSON is equal byte for byte."""
    raw = tmp_path / "raw" / "restore-raw.csv"
    raw.parent.mkdir()
    write(raw, invented_rows())
    outputs = []
    for name in ("one", "two"):
        result = CliRunner().invoke(app, ["restore", "--from-raw", str(raw), "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        outputs.append(result.output.splitlines()[-1])
        assert json.loads(outputs[-1])["plots"] == ["restore-figure4.png"]
        assert (tmp_path / name / "restore-figure4.png").read_bytes().startswith(b"\x89PNG")
    assert outputs[0] == outputs[1]


def test_omissions_of_a_quick_run_are_listed():
    """The full plan omits nothing."""
    assert left_out(FULL) == []
    text = "\n".join(left_out(QUICK))
    assert "restores at 2G: all" in text
    assert "restores at 8G: eager, incoming" in text
    assert "restores from: slow, s3" in text
    assert "length of a piece of work: compile 40 of 676" in text
    assert "second halves of transcode: 0 of 4" in text
