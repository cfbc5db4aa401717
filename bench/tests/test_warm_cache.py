"""Topic `warm-cache`: figures, tables and plots from invented rows; how the host's memory is measured."""

import json
from functools import partial

import pytest
import typer
from made_rows import write_rows
from typer.testing import CliRunner

from rekindle_bench.__main__ import main
from rekindle_bench.warm_cache import analysis, rows
from rekindle_bench.warm_cache.plan import FULL, QUICK, left_out
from rekindle_bench.warm_cache.queries import TPCH
from rekindle_bench.warm_cache.rows import Row
from rekindle_bench.warm_cache.watch import Watch, cached_kib, files_in, private_kib
from rekindle_bench.warm_cache.ways import turns
from rekindle_lab.web import Answer, rates

app = typer.Typer()
app.command()(main)
write = partial(write_rows, rows)
GIB = 1 << 30


def read(how, at, seconds, number, limit="paper"):
    us = round(seconds * 1e6)
    return Row(
        case="files",
        what="read",
        how=how,
        limit=limit,
        round=number,
        at=at,
        memory_mib=2048,
        block=4096,
        bytes=GIB,
        us=us,
    )


def second(how, number, at, mb):
    return Row(
        case="http",
        what="http",
        how=how,
        limit="paper",
        round=number,
        memory_mib=1024,
        second=at,
        requests=1,
        bytes=int(mb * 1e6),
        us=1,
    )


def made_up():
    made = []
    for number in range(8):
        for how, first in (("warm-cache", 2.0), ("cold", 12.0)):
            made += [read(how, at, s + number / 100, number) for at, s in ((-2, 1.8), (-1, 1.8), (1, first), (2, 1.8))]
            ram, private, code = 2100 * 1024, 500 * 1024, 400 * 1024
            columns = {"memory_mib": 2048, "ram_kib": ram, "private_kib": private, "code_kib": code, "cached_kib": 0}
            made.append(Row(case="files", what="memory", how=how, limit="paper", round=number, **columns))
            steps = [{"step": f"Q{n}", "us": 1000 * n} for n in range(1, 23)]
            runs = ((-1, 10.0), (1, 10.1 if how == "warm-cache" else 20.0))
            made += [
                Row(case="tpch", what="tpch", how=how, limit="paper", round=number, at=at, us=int(s * 1e6), steps=steps)
                for at, s in runs
            ]
            if how == "cold":
                made.append(
                    Row(
                        case="tpch",
                        what="tpch",
                        how="cold-read",
                        limit="paper",
                        round=number,
                        at=1,
                        us=10_000_000,
                        steps=steps,
                    )
                )
            made += [second(how, number, at, 20.0) for at in (-3, -2, -1)]
            made += [second(how, number, at, 19.8 if how == "warm-cache" else 4.0) for at in range(1, 8)]
        for how, ms in (("map", 1010), ("no-map", 1000)):
            columns = {"bytes": GIB, "us": ms * 1000 + number, "cpu_us": 1}
            made += [
                Row(case="map", what=what, how=how, limit="none", round=number, **columns)
                for what in ("read", "write", "bytes")
            ]
        for how, mb in (("server", 120), ("qsd", 80), ("qsd-threads", 100)):
            columns = {"block": 4096, "bytes": (mb + number) * 10**6, "us": 10**6, "cpu_us": mb * 10**4}
            columns["requests"] = 10**5
            made.append(Row(case="native", what="read", how=how, limit="none", round=number, **columns))
        columns = {"block": 1 << 20, "bytes": GIB, "us": 10**6, "cpu_us": 500_000}
        made.append(Row(case="native", what="read", how="attic", limit="none", round=number, **columns))
    made += [
        Row(case="helper", what="kill", how="server", limit="none", round=number, us=80_000 + 1000 * number)
        for number in range(11)
    ]
    made.append(Row(case="helper", what="verify", how="server", limit="none", round=0, bytes=GIB, errors=0))
    return made


def test_known_rows_give_known_figures(tmp_path):
    """Round n adds 10 ms to a read: medians of 1.835 s (before), 2.035 s (warm), 12.035 s (cold).

    Memory: 2100 + 500 - 400 MiB, less the allowed 64. The fastest daemon moves 102 MB/s, the server 122 MB/s.
    """
    findings = analysis.figures(write(tmp_path / "r.csv", made_up()), "r.csv")
    by_id = {figure.id: figure for figure in findings.figures}
    assert by_id["first_read_vs_cold"].value == pytest.approx(12.035 / 2.035, rel=1e-4)
    assert not by_id["first_read_vs_cold"].met
    assert by_id["first_read_vs_before"].value == pytest.approx(1.835 / 2.035, rel=1e-4)
    assert by_id["first_read_vs_before"].met
    assert by_id["tpch_after_vs_before"].value == pytest.approx(1.01)
    assert by_id["tpch_after_vs_floor"].value == pytest.approx(1.01)
    assert by_id["nginx_after_vs_before"].value == pytest.approx(0.99)
    assert by_id["map_cost"].met and by_id["map_cost_bytes"].value == pytest.approx(1.01, abs=1e-3)
    assert by_id["attic_read_native"].value == pytest.approx(GIB / 5e8)
    assert by_id["host_memory_peak"].value == pytest.approx((2200 - 64) / 2048)
    back, errors = by_id["helper_back"], by_id["helper_back_errors"]
    assert (back.value, back.n, back.met, errors.value, errors.met) == (85.0, 11, True, 0, True)
    # For this figure more is better.
    native = by_id["native_vs_qsd"].as_json()
    assert (native["met"], native["verdict"], native["bar"]) == (True, "better", ">= 1")
    # The peer is the fastest of the daemon's ways.
    assert native["value"] == pytest.approx(122 / 102, abs=0.02)
    assert (native["server_us_a_request"], native["peer_us_a_request"]) == (12.0, 10.0)
    assert [line for line in findings.absent if "write" in line]


def test_a_topic_is_analysed_again_from_its_rows(tmp_path):
    """By the command line, as a user does."""
    write(tmp_path / "warm-cache-raw.csv", made_up())
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["warm-cache", "--from-raw", str(tmp_path / "warm-cache-raw.csv"), "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    document = json.loads((out / "warm-cache.json").read_text())
    assert document["figures"]["native_vs_qsd"]["met"]
    assert {"warm-cache-files.png", "warm-cache-figure13.png"} <= {path.name for path in out.iterdir()}
    assert "first 5 s" in (out / "warm-cache.md").read_text()


def test_seconds_are_counted_until_the_reboot_and_since_the_guest_is_well_again():
    """10 answers per second for 3 s before the reboot; two whole seconds from 8.5 s until 10.8 s."""
    before = [Answer(n / 10, 0.01, 100) for n in range(1, 31)]
    # One more answer while the guest shuts down, then none for 5 s; all services answer again at 8.5 s.
    after = [Answer(3.2, 0.01, 100)] + [Answer(8.25 + n / 10, 0.05, 100) for n in range(1, 30)]
    findings = {second: requests for second, requests, _, _ in rates(before + after, 0.0, 3.0, 8.5, 10.8)}
    assert set(findings) == {-3, -2, -1, 1, 2}
    assert sum(findings[second] for second in (-3, -2, -1)) == 30
    assert findings[1] == findings[2] == 10
    # A second without an answer counts as zero.
    assert rates(before, 0.0, 3.0, 5.0, 6.5)[-1] == (1, 0, 0, 0)


def test_omissions_of_a_quick_run_are_listed():
    """The full plan omits nothing."""
    lines = left_out(QUICK)
    assert any("read of 512 bytes" in line for line in lines) and any("peers" in line for line in lines)
    assert left_out(FULL) == []


def test_there_are_22_queries_and_ways_are_taken_by_turns():
    """TPC-H has 22 queries."""
    files = sorted(path.name for path in TPCH.glob("q*.sql"))
    assert files == [f"q{n:02}.sql" for n in range(1, 23)]
    assert all(path.read_text().rstrip().endswith(";") for path in TPCH.glob("q*.sql"))
    assert turns(0, ("a", "b")) == ("a", "b") and turns(1, ("a", "b")) == ("b", "a")


def test_memory_in_open_files_counts_once_even_if_unlinked(tmp_path):
    """The file is open twice, and the process is named twice. A process that does not exist has no memory."""
    import os

    path = tmp_path / "ram"
    with path.open("wb") as one, path.open("rb"):
        one.write(os.urandom(1 << 20))
        one.flush()
        os.fsync(one.fileno())
        device = path.stat().st_dev
        named = files_in([os.getpid()], device)
        path.unlink()
        assert files_in([os.getpid(), os.getpid()], device) == named >= 1 << 20
    assert private_kib(os.getpid()) > 1024
    assert private_kib(2**30) == 0


def test_a_watch_ends_with_its_body_and_the_hosts_cache_is_measured(tmp_path):
    """No process has the folder's name in its command line."""
    with Watch(str(tmp_path), tmp_path) as watch:
        pass
    assert (watch.ram_kib, watch.private_kib) == (0, 0)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert cached_kib(path) <= 1024
