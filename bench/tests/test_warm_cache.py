"""Topic `warm-cache`: figures, tables and plots from invented rows; how the host's memory is measured.

The disk server keeps what a guest had cached (the *retained cache*), and serves it from there after a reboot:
`warm-cache`. The peers: a `cold` reboot, and `qsd`, QEMU's storage daemon. `at` numbers the reads and queries around a
reboot: -1 is the last one before it, 1 the first one after it. `limit` is the disk's rate (`paper`: that of the paper).
"""

import json
import os
import statistics
from functools import partial

import pytest
import typer
from row_files import write_rows
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
ROUNDS = 8
READ_BEFORE_S, FIRST_READ_S = 1.8, {"warm-cache": 2.0, "cold": 12.0}
"""Reads of a file in round 0; round n takes 10 ms longer for each n."""
MEDIAN_ROUND_S = 0.01 * (ROUNDS - 1) / 2
TPCH_BEFORE_S, TPCH_AFTER_S = 10.0, {"warm-cache": 10.1, "cold": 20.0}
HTTP_BEFORE_MB, HTTP_AFTER_MB = 20.0, {"warm-cache": 19.8, "cold": 4.0}
"""Served in one second."""
RAM_MIB, HOST_MIB = 2048, {"ram": 2100, "private": 500, "code": 400}
"""A guest's RAM, and the host's memory for it: in files, private, and program code, which does not count."""
MAP_MS = {"map": 1010, "no-map": 1000}
SERVER_MB, DAEMON_MB = 120, {"qsd": 80, "qsd-threads": 100}
"""Rates per s of round 0 on the native disk; round n is n MB faster. The CPU takes 10 ms for each MB of round 0."""
NATIVE_REQUESTS = 10**5
HELPER_BACK_MS = range(80, 91)
"""Times until a killed server serves again."""


def read(how, at, seconds, number):
    columns = {"memory_mib": RAM_MIB, "block": 4096, "bytes": GIB, "us": round(seconds * 1e6)}
    return Row(case="files", what="read", how=how, limit="paper", round=number, at=at, **columns)


def second(how, number, at, mb):
    """Returns a row of one second of a web server, before (`at` below 0) or after a reboot."""
    columns = {"memory_mib": 1024, "second": at, "requests": 1, "bytes": int(mb * 1e6), "us": 1}
    return Row(case="http", what="http", how=how, limit="paper", round=number, **columns)


def queries(how, number, at, seconds):
    """Returns a row of the 22 queries of TPC-H."""
    steps = [{"step": f"Q{n}", "us": 1000 * n} for n in range(1, 23)]
    columns = {"at": at, "us": int(seconds * 1e6), "steps": steps}
    return Row(case="tpch", what="tpch", how=how, limit="paper", round=number, **columns)


def invented_rows():
    all_rows = []
    for number in range(ROUNDS):
        for how in ("warm-cache", "cold"):
            reads_s = {-2: READ_BEFORE_S, -1: READ_BEFORE_S, 1: FIRST_READ_S[how], 2: READ_BEFORE_S}
            all_rows += [read(how, at, seconds + number / 100, number) for at, seconds in reads_s.items()]
            columns = {f"{kind}_kib": mib * 1024 for kind, mib in HOST_MIB.items()}
            columns |= {"memory_mib": RAM_MIB, "cached_kib": 0}
            all_rows.append(Row(case="files", what="memory", how=how, limit="paper", round=number, **columns))
            all_rows.append(queries(how, number, -1, TPCH_BEFORE_S))
            all_rows.append(queries(how, number, 1, TPCH_AFTER_S[how]))
            all_rows += [second(how, number, at, HTTP_BEFORE_MB) for at in (-3, -2, -1)]
            all_rows += [second(how, number, at, HTTP_AFTER_MB[how]) for at in range(1, 8)]
        # The floor of TPC-H: a cold reboot, after which all files are read before the queries.
        all_rows.append(queries("cold-read", number, 1, TPCH_BEFORE_S))
        for how, ms in MAP_MS.items():
            columns = {"bytes": GIB, "us": ms * 1000 + number, "cpu_us": 1}
            all_rows += [
                Row(case="map", what=what, how=how, limit="none", round=number, **columns)
                for what in ("read", "write", "bytes")
            ]
        for how, mb in {"server": SERVER_MB, **DAEMON_MB}.items():
            columns = {"block": 4096, "bytes": (mb + number) * 10**6, "us": 10**6, "cpu_us": mb * 10**4}
            columns["requests"] = NATIVE_REQUESTS
            all_rows.append(Row(case="native", what="read", how=how, limit="none", round=number, **columns))
        columns = {"block": 1 << 20, "bytes": GIB, "us": 10**6, "cpu_us": 500_000}
        all_rows.append(Row(case="native", what="read", how="attic", limit="none", round=number, **columns))
    all_rows += [
        Row(case="helper", what="kill", how="server", limit="none", round=number, us=ms * 1000)
        for number, ms in enumerate(HELPER_BACK_MS)
    ]
    all_rows.append(Row(case="helper", what="verify", how="server", limit="none", round=0, bytes=GIB, errors=0))
    return all_rows


def test_known_rows_give_known_figures(tmp_path):
    """Figures are ratios of medians; the peer is the fastest. `map`: the server records which page caches a block."""
    findings = analysis.figures(write(tmp_path / "r.csv", invented_rows()), "r.csv")
    by_id = {figure.id: figure for figure in findings.figures}
    before_s, warm_s, cold_s = (seconds + MEDIAN_ROUND_S for seconds in (READ_BEFORE_S, *FIRST_READ_S.values()))
    assert by_id["first_read_vs_cold"].value == pytest.approx(cold_s / warm_s, rel=1e-4)
    assert not by_id["first_read_vs_cold"].met
    assert by_id["first_read_vs_before"].value == pytest.approx(before_s / warm_s, rel=1e-4)
    assert by_id["first_read_vs_before"].met
    warm_tpch = TPCH_AFTER_S["warm-cache"] / TPCH_BEFORE_S
    assert by_id["tpch_after_vs_before"].value == by_id["tpch_after_vs_floor"].value == pytest.approx(warm_tpch)
    assert by_id["nginx_after_vs_before"].value == pytest.approx(HTTP_AFTER_MB["warm-cache"] / HTTP_BEFORE_MB)
    assert by_id["map_cost"].met
    assert by_id["map_cost_bytes"].value == pytest.approx(MAP_MS["map"] / MAP_MS["no-map"], abs=1e-3)
    assert by_id["attic_read_native"].value == pytest.approx(GIB / 5e8)  # bytes by CPU time: 0.5 s
    counted_mib = HOST_MIB["ram"] + HOST_MIB["private"] - HOST_MIB["code"] - 64  # 64 MiB are allowed
    assert by_id["host_memory_peak"].value == pytest.approx(counted_mib / RAM_MIB)
    back, errors = by_id["helper_back"], by_id["helper_back_errors"]
    assert (back.value, back.n, back.met, errors.value, errors.met) == (
        statistics.median(HELPER_BACK_MS),
        len(HELPER_BACK_MS),
        True,
        0,
        True,
    )
    native = by_id["native_vs_qsd"].as_json()
    assert (native["met"], native["verdict"], native["bar"]) == (True, "better", ">= 1")
    fastest_mb, median_round_mb = max(DAEMON_MB.values()), (ROUNDS - 1) / 2
    rate_ratio = (SERVER_MB + median_round_mb) / (fastest_mb + median_round_mb)
    assert native["value"] == pytest.approx(rate_ratio, abs=0.02)
    assert native["server_us_a_request"] == SERVER_MB * 10**4 / NATIVE_REQUESTS
    assert native["peer_us_a_request"] == fastest_mb * 10**4 / NATIVE_REQUESTS
    assert [line for line in findings.absent if "write" in line]


def test_a_topic_is_analysed_again_from_its_rows(tmp_path):
    """By the command line, as a user does."""
    write(tmp_path / "warm-cache-raw.csv", invented_rows())
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
    requests_in = {second: requests for second, requests, _, _ in rates(before + after, 0.0, 3.0, 8.5, 10.8)}
    assert set(requests_in) == {-3, -2, -1, 1, 2}
    assert sum(requests_in[second] for second in (-3, -2, -1)) == 30
    assert requests_in[1] == requests_in[2] == 10
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
