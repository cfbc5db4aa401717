"""Computes the figures and tables of warm-cache reboots from raw rows alone, so that a file can be analysed again.

A `frame` has a row for each measurement; `rows.Row` documents its columns. `what` is the kind of access, `how` the way
to reboot, `at` the index of the access: -2 and -1 before the reboot, 1 and 2 after it. *Warm* is a reboot that keeps
the guest's page cache for the disk server (the *retained cache*; `attic` in names), *cold* is a reboot without it.
"""

from dataclasses import replace

import pandas as pd

from rekindle_bench.report import Bar, Findings, Sample
from rekindle_bench.rows import matching, median_or_none, milliseconds, numbers, pick, seconds
from rekindle_lab.stats import median

from .native import PEERS
from .plan import LIMITS
from .rows import SANDBOXES_OFF, SANDBOXES_ON, WAYS
from .ways import COLD, WARM

FIRST_READ_VS_COLD, FIRST_READ_VS_BEFORE = 8.7, 0.84
"""Bars: least ratio of the rate of the first warm read to the first cold read, and to the last read before."""
SLOWDOWN = 1.02
"""Bar: greatest ratio of durations."""
HELPER_BACK_MS = 200
"""Bar: greatest time until a killed server serves again, in ms."""
SPEED_KEPT = 1.05
"""Bar: greatest ratio of a duration with all sandboxes to that without any."""
SPEEDS = {
    "vmm": "the pause of a reboot of the VMM",
    "protect": "the pause of a checkpoint",
    "protect-commit": "a checkpoint of 46 MB",
    "restore": "a restore",
    "fill": "all memory loaded",
    "disk": "random reads",
    "disk-write": "random writes with flushes",
}
"""What case `sandboxes` measures, by `Row.what`."""
FIRST_S = 5
"""Seconds of a web server directly after a reboot whose rate counts."""
STEADY_S = 10
"""Seconds directly before a reboot with which the seconds after it are compared."""
ALLOWED_MIB = 64
"""Host memory for a guest in addition to the guest's RAM that `host_memory_peak` does not count."""


def at_least(limit: float) -> Bar:
    """Returns the bar of a figure for which more is better."""
    return Bar(limit, ">=")


def rate(rows: pd.DataFrame) -> list[float]:
    """Returns the rate of each row in MB/s."""
    return numbers(rows["bytes"] / rows["us"])


def rate_per_core(rows: pd.DataFrame) -> list[float]:
    """Returns for each row the GB that the server moves in a second of processor time."""
    return numbers(rows["bytes"] / rows["cpu_us"] / 1e3)


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _first_read(frame, findings)
    _queries(frame, findings)
    _web(frame, findings)
    _map(frame, findings)
    _native(frame, findings)
    _retained(frame, findings)
    _memory(frame, findings)
    _helper(frame, findings)
    _speed_kept(frame, findings)
    return findings


def _first_read(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the first read after a warm reboot, by file system, limit of the disk and size of a request."""
    kinds = [(case, limit, block) for case in ("files", "folios") for limit in LIMITS for block in (4096, 1 << 20)]
    for case, limit, block in kinds:
        rows = matching(frame, case=case, what="read", limit=limit, block=block)
        # Only the first kind is reported as missing: the others are not part of every plan.
        if not len(rows) and (case, limit, block) != kinds[0]:
            continue
        suffix = ("_xfs" if case == "folios" else "") + ("_1m" if block > 4096 else "")
        suffix += "" if limit == kinds[0][1] else f"_{limit}"
        first = Sample("first read, warm", rate(matching(rows, how=WARM, at=1)))
        for name, limit_of_ratio, other in (
            ("vs_cold", FIRST_READ_VS_COLD, Sample("first read, cold", rate(matching(rows, how=COLD, at=1)))),
            ("vs_before", FIRST_READ_VS_BEFORE, Sample("last read before", rate(matching(rows, how=WARM, at=-1)))),
        ):
            findings.add_ratio(
                f"first_read_{name}{suffix}",
                at_least(limit_of_ratio),
                ours=first,
                peer=other,
                with_peer=False,
                unit="MB/s",
            )


def _queries(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares the first run of all TPC-H queries after a warm reboot with the last before, and with a floor.

    The floor is a cold reboot after which all files were read before the run.
    """

    def runs(label: str, how: str, at: int) -> Sample:
        return Sample(label, seconds(pick(frame, "us", case="tpch", how=how, at=at)))

    first, before = runs("first run, warm", WARM, 1), runs("last run before", WARM, -1)
    findings.add_ratio("tpch_after_vs_before", Bar(SLOWDOWN), ours=first, peer=before, with_peer=False, unit="s")
    floor = runs("first run, all read beforehand", "cold-read", 1)
    if floor.values:
        findings.add_ratio("tpch_after_vs_floor", Bar(SLOWDOWN), ours=first, peer=floor, with_peer=False, unit="s")


def _web_rates(frame: pd.DataFrame, how: str) -> tuple[list[float], list[float]]:
    """Returns MB/s in the first seconds after each reboot, and in the last seconds before it."""
    after, before = [], []
    for _, rows in matching(frame, case="http", what="http", how=how).groupby("round"):
        first = rows[rows["second"].between(1, FIRST_S)]
        last = rows[rows["second"].between(-STEADY_S, -1)]
        if len(first) and len(last):
            after.append(float(first["bytes"].sum()) / len(first) / 1e6)
            before.append(float(last["bytes"].sum()) / len(last) / 1e6)
    return after, before


def _web(frame: pd.DataFrame, findings: Findings) -> None:
    after, before = _web_rates(frame, WARM)
    findings.add_ratio(
        "nginx_after_vs_before",
        at_least(0.95),
        ours=Sample(f"the first {FIRST_S} s, warm", after),
        peer=Sample(f"the last {STEADY_S} s before", before),
        with_peer=False,
        unit="MB/s",
    )


def _map(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares accesses with and without the block map (which blocks the guest has cached), without reboots."""
    names = {"read": "map_cost", "write": "map_cost_write", "bytes": "map_cost_bytes"}
    for what, name in names.items():
        rows = matching(frame, case="map", what=what)
        with_map = Sample("with the map", seconds(pick(rows, "us", how="map")))
        without_map = Sample("without", seconds(pick(rows, "us", how="no-map")))
        findings.add_ratio(name, Bar(SLOWDOWN), ours=with_map, peer=without_map, with_peer=False, unit="s")


def _cost_us(rows: pd.DataFrame) -> float | None:
    """Returns the median processor time per request in us."""
    return median_or_none(numbers(rows["cpu_us"] / rows["requests"]))


def _native(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares Rekindle's disk server with QEMU's storage daemon, without a guest."""
    names = {
        ("read", 4096): "native_vs_qsd",
        ("read", 1 << 20): "native_vs_qsd_1m",
        ("write", 4096): "native_vs_qsd_write",
        ("write", 1 << 20): "native_vs_qsd_write_1m",
    }
    for (what, block), name in names.items():
        rows = matching(frame, case="native", what=what, block=block)
        ours, peers = matching(rows, how="server"), {how: matching(rows, how=how) for how in PEERS}
        # The fastest of the daemon's ways counts for this kind.
        best = max(PEERS, key=lambda how: median(rate(peers[how])) if len(peers[how]) else 0.0)
        costs_us = {"server_us_a_request": _cost_us(ours), "peer_us_a_request": _cost_us(peers[best])}
        findings.add_ratio(
            name,
            at_least(1.0),
            ours=Sample("server", rate(ours)),
            peer=Sample(f"qemu-storage-daemon, {PEERS[best]}", rate(peers[best])),
            unit="MB/s",
            extra={key: cost_us for key, cost_us in costs_us.items() if cost_us is not None},
        )


def _retained(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the rate at which the server returns its retained cache, per core."""
    for name, how in (("attic_read_native", "attic"), ("attic_read_native_fresh", "attic-fresh")):
        rows = matching(frame, how=how)
        if len(rows):
            extra = {"of_wall_time": median(rate(rows)) / 1e3}
            findings.add(name, rate_per_core(rows), "GB/s", at_least(2.0), extra=extra)
        else:
            findings.report_missing(name)


def taken_mib(rows: pd.DataFrame) -> pd.Series:
    """Returns the host's memory for the guest, without the code that the emulation has translated."""
    return (rows["ram_kib"] + rows["private_kib"] - rows["code_kib"]) / 1024


def _memory(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the host's memory at its peak through a warm reboot, as a share of the guest's RAM."""
    rows = matching(frame, case="files", what="memory", how=WARM)
    if not len(rows):
        findings.report_missing("host_memory_peak")
        return
    shares = numbers((taken_mib(rows) - ALLOWED_MIB) / rows["memory_mib"])
    extra = {"of_memory_files": max(numbers(rows["ram_kib"] / 1024 / rows["memory_mib"]))}
    findings.add("host_memory_peak", shares, "", Bar(1.05), value=max(shares), extra=extra)


def _helper(frame: pd.DataFrame, findings: Findings) -> None:
    """Adds the time until a killed disk server serves again, and the errors that the guest saw meanwhile."""
    kills_ms = milliseconds(pick(frame, "us", case="helper", what="kill"))
    errors = pick(frame, "errors", case="helper", what="verify")
    if not kills_ms or not errors:
        findings.report_missing("helper_back")
        return
    findings.add("helper_back", kills_ms, "ms", Bar(HELPER_BACK_MS), extra={"worst": max(kills_ms)})
    all_errors = sum(errors)
    findings.add("helper_back_errors", [all_errors], "errors", Bar(0), n=len(kills_ms))


def _speed_kept(frame: pd.DataFrame, findings: Findings) -> None:
    """Compares durations with all sandboxes with those without any; `speed_kept` is the worst of the ratios."""
    if not len(matching(frame, case="sandboxes")):
        findings.report_missing("speed_kept")
        return
    kept = Findings(findings.raw)
    for what, label in SPEEDS.items():
        on_ms, off_ms = (
            milliseconds(pick(frame, "us", case="sandboxes", what=what, how=how))
            for how in (SANDBOXES_ON, SANDBOXES_OFF)
        )
        kept.add_ratio(
            f"speed_kept_{what.replace('-', '_')}",
            Bar(SPEED_KEPT),
            ours=Sample(f"{label}, with all sandboxes", on_ms),
            peer=Sample("without", off_ms),
            with_peer=False,
        )
    findings.figures += kept.figures
    findings.absent += kept.absent
    if kept.absent:
        findings.report_missing("speed_kept", "all of its parts")
    else:
        findings.figures.append(replace(max(kept.figures, key=lambda figure: figure.value), id="speed_kept"))


def through_reboots(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of files that are read and written before and after a reboot; `on`: their file system."""
    rows = frame[frame["case"].isin(["files", "folios", "peers"]) & (frame["what"] != "memory")]
    return rows.assign(on=["XFS" if case == "folios" else "ext4" for case in rows["case"]])


def accesses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the rates of each kind of access, before and after a reboot."""
    lines = []
    by = ["limit", "on", "what", "block", "how"]
    for (limit, on, what, block, how), rows in through_reboots(frame).groupby(by, sort=False):
        line: dict[str, object] = {"disk": limit, "on": on, "access": what, "block": int(block), "reboot": how}
        for at in (-2, -1, 1, 2):
            line[f"{at:+d}"] = median_or_none(rate(matching(rows, at=at)))
        line["n"] = len(matching(rows, at=1))
        lines.append(line)
    return lines


def table_1(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's table 1: the duration of all TPC-H queries in s, before and after a reboot."""
    lines = []
    for how, rows in matching(frame, case="tpch").groupby("how", sort=False):
        line: dict[str, object] = {"reboot": how}
        for at in (-2, -1, 1, 2):
            line[f"{at:+d}"] = median_or_none(seconds(pick(rows, "us", at=at)))
        lines.append({**line, "n": len(matching(rows, at=1))})
    return lines


def web(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the web server's rate before a reboot and in the first seconds after it."""
    lines = []
    for how in (WARM, COLD):
        after, before = _web_rates(frame, how)
        if after:
            medians = {"before": median(before), f"first {FIRST_S} s": median(after)}
            lines.append({"reboot": how, **medians, "n": len(after)})
    return lines


def memory(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the memory that the host has used for each guest, in MiB, in the reboot that used the most."""
    lines = []
    for (case, how), rows in matching(frame, what="memory").groupby(["case", "how"], sort=False):
        rows = rows.assign(taken_mib=taken_mib(rows)).sort_values("taken_mib")
        most = rows.iloc[-1]
        lines.append(
            {
                "case": case,
                "reboot": how,
                "guest": int(most["memory_mib"]),
                "memory files": most["ram_kib"] / 1024,
                "QEMU and server": most["private_kib"] / 1024,
                "of that translated code": most["code_kib"] / 1024,
                "all but that": float(most["taken_mib"]),
                "out of the attic": float(rows["bytes"].median()) / (1 << 20),
                "host's cache of the image": float(rows["cached_kib"].max()) / 1024,
                "n": len(rows),
            }
        )
    return lines


def costs(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the cost of the block map, in the guest and in the disk server."""
    lines = []
    for what, of_access in matching(frame, case="map").groupby("what", sort=False):
        line: dict[str, object] = {"access": what}
        for how in ("map", "no-map"):
            rows = matching(of_access, how=how)
            line[f"{how}, s"] = median(seconds(rows["us"]))
            line[f"{how}, server's s"] = median(seconds(rows["cpu_us"]))
        lines.append({**line, "n": len(matching(of_access, how="map"))})
    return lines


def servers(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists rates and processor time of the disk servers."""
    lines = []
    for (what, block, how), rows in matching(frame, case="native").groupby(["what", "block", "how"], sort=False):
        lines.append(
            {
                "access": what,
                "block": int(block),
                "server": how,
                "MB/s": median(rate(rows)),
                "GB/s a core": median(rate_per_core(rows)),
                "us a request": _cost_us(rows),
                "n": len(rows),
            }
        )
    return lines


def ways(frame: pd.DataFrame) -> list[str]:
    """Returns the ways that have rows, in order."""
    return [way for way in WAYS if way in set(frame["how"])]
