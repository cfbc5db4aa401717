"""Topic `warm-cache`: figures, tables and plots from invented rows; how the host's memory is measured.

The disk server keeps what a guest had cached (the *retained cache*), and serves it from there after a reboot:
`warm-cache`. The peers: a `cold` reboot, and `qsd`, QEMU's storage daemon. `at` numbers the reads and queries around a
reboot: -1 is the last one before it, 1 the first one after it. `limit` is the disk's rate (`paper`: that of the paper).
"""

import json
import os
import statistics
from functools import partial
from pathlib import Path

import pytest
import typer
from row_files import write_rows
from typer.testing import CliRunner

from rekindle_bench.__main__ import main
from rekindle_bench.warm_cache import analysis, rows
from rekindle_bench.warm_cache.cache_guests import CacheGuest
from rekindle_bench.warm_cache.plan import FULL, QUICK, left_out
from rekindle_bench.warm_cache.queries import TPCH
from rekindle_bench.warm_cache.rows import Row
from rekindle_bench.warm_cache.watch import Watch, cached_kib, files_in, private_kib
from rekindle_bench.warm_cache.ways import turns
from rekindle_lab.guests import Image
from rekindle_lab.web import Answer, rates

app = typer.Typer()
app.command()(main)
write = partial(write_rows, rows)
GIB = 1 << 30
ROUNDS = 8
MEDIAN_ROUND = (ROUNDS - 1) / 2
"""Durations and rates grow linearly with the round, so their medians are those of this round."""

READ_BEFORE_S = 1.8
"""Duration of a read of a file in round 0, before a reboot and at the second read after it."""
FIRST_READ_S = {"warm-cache": 2.0, "cold": 12.0}
"""Duration of the first read after a reboot in round 0."""
READ_STEP_S = 0.01
"""Each round's reads take longer than those of the round before it by this."""

TPCH_BEFORE_S = 10.0
"""Duration of all queries of TPC-H before a reboot."""
TPCH_AFTER_S = {"warm-cache": 10.1, "cold": 20.0}
"""Duration of all queries after a reboot."""

HTTP_BEFORE_MB = 20.0
"""What a web server sends in one second before a reboot."""
HTTP_AFTER_MB = {"warm-cache": 19.8, "cold": 4.0}
"""What it sends in one second after a reboot."""

RAM_MIB = 2048
"""The guest's RAM."""
HOST_MIB = {"ram": 2100, "private": 500, "code": 400}
"""The host's memory for the guest: in files, private, and the program code in it, which does not count."""

MAP_MS = {"map": 1010, "no-map": 1000}
"""Duration of an access with and without the block map, in which the server records which blocks the guest caches."""

SERVER_MB = 120
"""Rate of Rekindle's disk server per s in round 0, without a guest. It is 1 MB higher in each round."""
DAEMON_MB = {"qsd": 80, "qsd-threads": 100}
"""The same of QEMU's storage daemon, in the two ways to run it."""
NATIVE_REQUESTS = 10**5
"""Requests in one measurement of these rates."""
CPU_US_PER_MB = 10**4
"""Processor time of a measurement, for each MB of the rate in round 0."""
RETAINED_READ_CPU_S = 0.5
"""Processor time for 1 GiB from the retained cache."""

HELPER_BACK_MS = range(80, 91)
"""Times until a killed server serves again, one for each kill."""

SANDBOX_MS = {
    "vmm": (102, 100),
    "protect": (5, 5),
    "protect-commit": (100, 100),
    "restore": (104, 100),
    "fill": (2000, 2000),
    "disk": (1000, 1000),
    "disk-write": (990, 1000),
}
"""Durations with all sandboxes and without any, by kind of measurement."""


def row(case, what, how, limit, number, **columns):
    """Returns a row of round `number`."""
    return Row(case=case, what=what, how=how, limit=limit, round=number, **columns)


def read_row(how, at, seconds, number):
    """Returns a row of a read of 1 GiB in a guest."""
    columns = {"memory_mib": RAM_MIB, "block": 4096, "bytes": GIB, "us": round(seconds * 1e6)}
    return row("files", "read", how, "paper", number, at=at, **columns)


def web_row(how, number, second, mb):
    """Returns a row of one second of a web server, before (`second` below 0) or after a reboot."""
    columns = {"memory_mib": 1024, "second": second, "requests": 1, "bytes": int(mb * 1e6), "us": 1}
    return row("http", "http", how, "paper", number, **columns)


def tpch_row(how, number, at, seconds):
    """Returns a row of the 22 queries of TPC-H."""
    steps = [{"step": f"Q{n}", "us": 1000 * n} for n in range(1, 23)]
    return row("tpch", "tpch", how, "paper", number, at=at, us=int(seconds * 1e6), steps=steps)


def reboot_rows(how, number):
    """Returns what is measured before and after one reboot: reads of files, memory, queries and the web server."""
    reads_s = {-2: READ_BEFORE_S, -1: READ_BEFORE_S, 1: FIRST_READ_S[how], 2: READ_BEFORE_S}
    host_kib = {f"{kind}_kib": mib * 1024 for kind, mib in HOST_MIB.items()}
    return [
        *(read_row(how, at, seconds + READ_STEP_S * number, number) for at, seconds in reads_s.items()),
        row("files", "memory", how, "paper", number, memory_mib=RAM_MIB, cached_kib=0, **host_kib),
        tpch_row(how, number, -1, TPCH_BEFORE_S),
        tpch_row(how, number, 1, TPCH_AFTER_S[how]),
        *(web_row(how, number, second, HTTP_BEFORE_MB) for second in (-3, -2, -1)),
        *(web_row(how, number, second, HTTP_AFTER_MB[how]) for second in range(1, 8)),
    ]


def map_rows(number):
    """Returns the accesses with and without the block map."""
    return [
        row("map", what, how, "none", number, bytes=GIB, us=ms * 1000 + number, cpu_us=1)
        for how, ms in MAP_MS.items()
        for what in ("read", "write", "bytes")
    ]


def native_rows(number):
    """Returns what is measured of the disk servers without a guest (`native`). There are no writes."""
    all_rows = []
    for how, mb in {"server": SERVER_MB, **DAEMON_MB}.items():
        columns = {"bytes": (mb + number) * 10**6, "us": 10**6, "cpu_us": mb * CPU_US_PER_MB}
        all_rows.append(row("native", "read", how, "none", number, block=4096, requests=NATIVE_REQUESTS, **columns))
    # A read of 1 GiB from the retained cache, in requests of 1 MiB. `attic` is its name in rows.
    columns = {"block": 1 << 20, "bytes": GIB, "us": 10**6, "cpu_us": int(RETAINED_READ_CPU_S * 1e6)}
    return [*all_rows, row("native", "read", "attic", "none", number, **columns)]


def helper_rows():
    """Returns kills of the disk server, and one check of what the guest has read meanwhile."""
    kills = [row("helper", "kill", "server", "none", number, us=ms * 1000) for number, ms in enumerate(HELPER_BACK_MS)]
    return [*kills, row("helper", "verify", "server", "none", 0, bytes=GIB, errors=0)]


def sandbox_rows(number, durations_ms=SANDBOX_MS):
    """Returns what is measured with all sandboxes and without any in one round."""
    return [
        row("sandboxes", what, how, "none", number, us=ms * 1000)
        for what, of_sides in durations_ms.items()
        for how, ms in zip(("on", "off"), of_sides, strict=True)
    ]


def invented_rows():
    all_rows = []
    for number in range(ROUNDS):
        all_rows += reboot_rows("warm-cache", number) + reboot_rows("cold", number)
        # The floor of TPC-H: a cold reboot, after which all files are read before the queries.
        all_rows.append(tpch_row("cold-read", number, 1, TPCH_BEFORE_S))
        all_rows += map_rows(number) + native_rows(number) + sandbox_rows(number)
    return all_rows + helper_rows()


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "r.csv"
    return analysis.figures(write(path, invented_rows()), path.name)


@pytest.fixture(scope="module")
def figures(findings):
    """The figures of the invented rows, by id."""
    return {figure.id: figure for figure in findings.figures}


def test_the_first_read_is_compared_with_a_cold_one_and_with_the_last_one_before(figures):
    """By the median of the rates. Both bars are in `analysis`."""
    before_s, warm_s, cold_s = (
        seconds + READ_STEP_S * MEDIAN_ROUND
        for seconds in (READ_BEFORE_S, FIRST_READ_S["warm-cache"], FIRST_READ_S["cold"])
    )
    vs_cold, vs_before = figures["first_read_vs_cold"], figures["first_read_vs_before"]
    assert vs_cold.value == pytest.approx(cold_s / warm_s, rel=1e-4)
    assert cold_s / warm_s < analysis.FIRST_READ_VS_COLD
    assert not vs_cold.met
    assert vs_before.value == pytest.approx(before_s / warm_s, rel=1e-4)
    assert before_s / warm_s > analysis.FIRST_READ_VS_BEFORE
    assert vs_before.met


def test_queries_and_the_web_server_are_compared_with_those_before_the_reboot(figures):
    """The floor of the queries is as fast as they were before."""
    slowdown = TPCH_AFTER_S["warm-cache"] / TPCH_BEFORE_S
    assert figures["tpch_after_vs_before"].value == figures["tpch_after_vs_floor"].value == pytest.approx(slowdown)
    assert figures["nginx_after_vs_before"].value == pytest.approx(HTTP_AFTER_MB["warm-cache"] / HTTP_BEFORE_MB)


def test_the_block_map_costs_what_accesses_take_longer_with_it(figures):
    """The rows have three kinds of accesses; all take equally long."""
    assert figures["map_cost"].met
    assert figures["map_cost_bytes"].value == pytest.approx(MAP_MS["map"] / MAP_MS["no-map"], abs=1e-3)


def test_reads_from_the_retained_cache_are_counted_by_processor_time(figures):
    """In GB per s of one core."""
    assert figures["attic_read_native"].value == pytest.approx(GIB / 1e9 / RETAINED_READ_CPU_S)


def test_program_code_and_the_allowed_memory_are_not_counted(figures):
    """As a share of the guest's RAM."""
    allowed_mib = 64
    counted_mib = HOST_MIB["ram"] + HOST_MIB["private"] - HOST_MIB["code"] - allowed_mib
    assert figures["host_memory_peak"].value == pytest.approx(counted_mib / RAM_MIB)


def test_a_killed_server_is_back_after_the_median_of_the_kills(figures):
    """The guest has seen no error."""
    back, errors = figures["helper_back"], figures["helper_back_errors"]
    assert (back.value, back.n) == (statistics.median(HELPER_BACK_MS), len(HELPER_BACK_MS))
    assert back.met
    assert errors.value == 0
    assert errors.met


def test_the_server_is_compared_with_the_fastest_way_of_the_daemon(figures):
    """By rate and by processor time per request."""
    native = figures["native_vs_qsd"].as_json()
    assert (native["met"], native["verdict"], native["bar"]) == (True, "better", ">= 1")
    fastest_mb = max(DAEMON_MB.values())
    rate_ratio = (SERVER_MB + MEDIAN_ROUND) / (fastest_mb + MEDIAN_ROUND)
    assert native["value"] == pytest.approx(rate_ratio, rel=1e-5)  # six digits are reported
    assert native["server_us_a_request"] == SERVER_MB * CPU_US_PER_MB / NATIVE_REQUESTS
    assert native["peer_us_a_request"] == fastest_mb * CPU_US_PER_MB / NATIVE_REQUESTS


def test_each_speed_with_all_sandboxes_is_compared_with_that_without(figures):
    """`speed_kept` is the worst of the ratios, here that of a restore."""
    kept = {id_: figure for id_, figure in figures.items() if id_.startswith("speed_kept_")}
    assert {id_: figure.value for id_, figure in kept.items()} == {
        f"speed_kept_{what.replace('-', '_')}": pytest.approx(on_ms / off_ms)
        for what, (on_ms, off_ms) in SANDBOX_MS.items()
    }
    assert all(figure.met and figure.n == ROUNDS and not figure.verdict for figure in kept.values())
    worst = figures["speed_kept"].as_json()
    assert (worst["value"], worst["bar"], worst["met"]) == (1.04, "<= 1.05", True)
    assert worst["ours_is"] == "a restore, with all sandboxes"


def test_a_speed_that_is_not_kept_misses(tmp_path):
    """A fill takes 6 % longer."""
    slow_rows = [one for number in range(ROUNDS) for one in sandbox_rows(number, {**SANDBOX_MS, "fill": (2120, 2000)})]
    findings = analysis.figures(write(tmp_path / "r.csv", slow_rows), "r.csv")
    assert {figure.id for figure in findings.figures if not figure.met} == {"speed_kept_fill", "speed_kept"}


def test_without_one_of_its_parts_there_is_no_worst_speed(tmp_path):
    """Writes were not measured without sandboxes. Without any rows, only `speed_kept` is reported as absent."""
    some_rows = [one for one in sandbox_rows(0) if (one.what, one.how) != ("disk-write", "off")]
    findings = analysis.figures(write(tmp_path / "r.csv", some_rows), "r.csv")
    assert "speed_kept" not in {figure.id for figure in findings.figures}
    kept = [line for line in findings.absent if "speed_kept" in line]
    assert kept == [
        "figure speed_kept_disk_write: no rows for without",
        "figure speed_kept: no rows for all of its parts",
    ]
    findings = analysis.figures(write(tmp_path / "s.csv", helper_rows()), "s.csv")
    assert [line for line in findings.absent if "speed_kept" in line] == ["figure speed_kept: no rows"]


def test_a_guest_can_have_no_filter_of_system_calls(tmp_path):
    """Also one whose disk server was started manually. By default Rekindle's own filter stays."""
    guest = partial(
        CacheGuest,
        "a",
        Image("debian-cache", Path("image")),
        512,
        1,
        None,
        netns="n",
        ram_dir=tmp_path,
        disk_dir=tmp_path,
    )
    assert guest().qemu_args() == []
    assert guest(sandboxed=False).qemu_args() == ["-sandbox", "off"]
    assert guest(cache="/a/socket", sandboxed=False).qemu_args()[:3] == ["-sandbox", "off", "-chardev"]
    assert guest(cache="/a/socket").qemu_args()[0] == "-chardev"


def test_a_kind_of_access_without_rows_is_reported_as_absent(findings):
    """The disk servers were not measured with writes."""
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
    assert f"pairs of guests with and without sandboxes: {QUICK.sandbox_pairs} of {FULL.sandbox_pairs}" in lines
    assert any(f"disk {QUICK.sandbox_rounds['disk']} of {FULL.sandbox_rounds['disk']}" in line for line in lines)
    # At least 20 of each kind, as for every figure of the project.
    assert min(FULL.sandbox_rounds.values()) * FULL.sandbox_pairs >= 20
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
