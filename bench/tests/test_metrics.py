"""Topic `metrics` with invented rows: the figures, and what misses their bars."""

from row_files import write_rows

from rekindle_bench.metrics import analysis, rows
from rekindle_bench.metrics.plan import FULL, QUICK, left_out
from rekindle_bench.metrics.rows import Row


def invented(cpu_us=300_000, ready_us=400_000, worst_us=33_000, loads=10, windows=5):
    """Returns rows of each case; only the last window of scrolling has the worst frame."""
    made = [
        Row(case="cost", round=n, guests=200, window_us=60_000_000, cpu_us=cpu_us, checkpoints=10_000, bytes=90_000)
        for n in range(8)
    ]
    for row in made:
        row.scrapes = 4
    made += [
        Row(case="load", round=n, guests=200, interactive_us=90_000, complete_us=380_000, ready_us=ready_us + n)
        for n in range(loads)
    ]
    for n in range(windows):
        frames = [16_700] * 99 + [worst_us if n == windows - 1 else 20_000]
        made.append(Row(case="frames", round=n, guests=200, window_us=6_000_000, checkpoints=1000, frames_us=frames))
    return made


def figures(tmp_path, made):
    """Returns the figures of rows, by id."""
    frame = write_rows(rows, tmp_path / "metrics-raw.csv", made)
    return {figure.id: figure for figure in analysis.figures(frame, "metrics-raw.csv").figures}


def test_good_rows_meet_all_bars(tmp_path):
    """The cost is a percentage of one core, the load a median, the frame the worst of all windows."""
    found = figures(tmp_path, invented())
    assert found["metrics_cost"].value == 0.5 and found["metrics_cost"].n == 8
    assert found["page_200_ready"].value == 400.0045 and found["page_200_ready"].n == 10
    assert found["page_200_frame"].value == 33.0 and found["page_200_frame"].n == 5
    assert found["page_200_frame"].extra["frames"] == 500 and found["page_200_frame"].extra["frames_median"] == 16.7
    assert list(found) == ["metrics_cost", "page_200_ready", "page_200_frame"]
    assert all(figure.met for figure in found.values())


def test_each_bar_can_be_missed(tmp_path):
    """An expensive server, a slow load, one slow frame, and too few loads or windows."""
    for changes, missed in (
        ({"cpu_us": 700_000}, "metrics_cost"),
        ({"ready_us": 1_000_001}, "page_200_ready"),
        ({"loads": 9}, "page_200_ready"),
        ({"worst_us": 51_000}, "page_200_frame"),
        ({"windows": 4}, "page_200_frame"),
    ):
        found = figures(tmp_path, invented(**changes))
        assert [name for name, figure in found.items() if not figure.met] == [missed]


def test_figures_without_rows_are_named(tmp_path):
    """Each figure of a case that was not run is listed."""
    for case, absent in (("cost", ["page_200_ready", "page_200_frame"]), ("load", ["metrics_cost", "page_200_frame"])):
        frame = write_rows(rows, tmp_path / "metrics-raw.csv", [row for row in invented() if row.case == case])
        findings = analysis.figures(frame, "metrics-raw.csv")
        assert findings.absent == [f"figure {name}: no rows" for name in absent]


def test_tables_list_windows_and_points(tmp_path):
    """The tables have a line for each window, and for each point of a load."""
    frame = write_rows(rows, tmp_path / "metrics-raw.csv", invented(worst_us=51_000))
    assert [line["% of one core"] for line in analysis.costs(frame)] == [0.5] * 8
    assert [line["until"] for line in analysis.loads(frame)] == ["script ready", "all rows", "both, drawn"]
    assert [line["above 50 ms"] for line in analysis.frames(frame)] == [0, 0, 0, 0, 1]


def test_omissions_of_a_quick_run_are_listed():
    """The quick plan has fewer repetitions, but as many as the bars require."""
    assert left_out(FULL) == [] and len(left_out(QUICK)) == 3
    assert QUICK.loads >= analysis.LEAST_LOADS and QUICK.frame_windows >= analysis.LEAST_FRAME_WINDOWS
