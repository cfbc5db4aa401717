"""Topic `store` with invented rows: the figures, and what misses their bars."""

from row_files import write_rows

from rekindle_bench.store import analysis, rows
from rekindle_bench.store.plan import FULL, QUICK, left_out
from rekindle_bench.store.rows import Row


def invented(commit_us=500_000, put_us=400_000, s3_us=80_000, tls_us=50_000, owners=1, error=""):
    """Returns rows of two rounds of each case."""
    made = []
    for number in range(2):
        made += [
            Row(case="commit", how="s3", round=number, took_us=commit_us + number, bytes=46_000_000),
            Row(case="commit", how="put", round=number, took_us=put_us + number, bytes=46_000_000),
            Row(case="restore", how="s3", round=number, took_us=s3_us, fill_us=1_000_000, worst_us=9_000),
            Row(case="restore", how="tls", round=number, took_us=tls_us, fill_us=2_000_000, worst_us=5_000),
            Row(case="owners", how="claim", round=2 * number, took_us=30_000, owners=1),
            Row(case="owners", how="commit", round=2 * number + 1, took_us=40_000, owners=owners, error=error),
        ]
    return made


def figures(tmp_path, **changes):
    """Returns the figures of invented rows, by id."""
    frame = write_rows(rows, tmp_path / "store-raw.csv", invented(**changes))
    return {figure.id: figure for figure in analysis.figures(frame, "store-raw.csv").figures}


def test_good_rows_meet_all_bars(tmp_path):
    """A commit is compared with a PUT, a restore with a time and with the other store, races are counted."""
    found = figures(tmp_path)
    assert found["s3_commit_vs_dir"].value == 500_000.5 / 400_000.5 and found["s3_commit_vs_dir"].n == 2
    assert found["s3_restore"].value == 80.0 and found["s3_restore"].contrast.result.ratio == 1.6
    assert found["s3_owners"].value == 0 and found["s3_owners"].n == 4
    assert all(figure.met for figure in found.values())


def test_a_restore_without_rows_of_the_server_has_no_ratio(tmp_path):
    """Only earlier rows have restores from Rekindle's server."""
    for s3_us, is_met in ((80_000, True), (160_000, False)):
        made = [row for row in invented(s3_us=s3_us) if row.how != "tls"]
        frame = write_rows(rows, tmp_path / "store-raw.csv", made)
        found = {figure.id: figure for figure in analysis.figures(frame, "store-raw.csv").figures}["s3_restore"]
        assert found.value == s3_us / 1e3 and found.contrast is None and found.met == is_met
        assert [line["store"] for line in analysis.restores(frame)] == ["s3"]


def test_each_bar_can_be_missed(tmp_path):
    """A slow commit, a restore that is slow, or only slower than from the server, and a race with two or no owners."""
    assert not figures(tmp_path, commit_us=530_000)["s3_commit_vs_dir"].met
    assert not figures(tmp_path, s3_us=160_000, tls_us=100_000)["s3_restore"].met
    assert not figures(tmp_path, s3_us=80_000, tls_us=30_000)["s3_restore"].met
    for owners in (0, 2):
        found = figures(tmp_path, owners=owners)["s3_owners"]
        assert found.value == 2 and not found.met


def test_a_race_with_an_error_does_not_count_as_one_with_one_owner(tmp_path):
    """A request whose answer was lost may have been carried out, so that the number of owners is unknown."""
    found = figures(tmp_path, owners=None, error="no answer")["s3_owners"]
    assert found.value == 2 and not found.met and found.extra["errors"] == 2


def test_figures_without_rows_are_named(tmp_path):
    """Each figure of a case that was not run is listed."""
    frame = write_rows(rows, tmp_path / "store-raw.csv", [row for row in invented() if row.how == "put"])
    absent = analysis.figures(frame, "store-raw.csv").absent
    assert [line.split(":")[0] for line in absent] == [
        "figure s3_commit_vs_dir",
        "figure s3_restore",
        "figure s3_owners",
    ]


def test_tables_list_every_way(tmp_path):
    """The tables have a line for each way, and count wrong races."""
    frame = write_rows(rows, tmp_path / "store-raw.csv", invented(owners=2, error="no answer"))
    assert [line["way"] for line in analysis.commits(frame)] == ["put", "s3"]
    assert [line["store"] for line in analysis.restores(frame)] == ["s3", "tls"]
    assert [(line["race"], line["two owners"], line["errors"]) for line in analysis.races(frame)] == [
        ("claim", 0, 0),
        ("commit", 2, 2),
    ]
    frame = write_rows(rows, tmp_path / "unknown-raw.csv", invented(owners=None, error="no answer"))
    assert [line["unknown"] for line in analysis.races(frame)] == [0, 2]


def test_omissions_of_a_quick_run_are_listed():
    """The quick plan has fewer repetitions."""
    assert left_out(FULL) == [] and FULL.races == 10_000
    assert len(left_out(QUICK)) == 3 and QUICK.races < FULL.races
