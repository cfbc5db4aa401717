"""Computes the figures of warm-cache reboots from raw rows alone, so that a file can be analysed again.

A row is one measurement; `rows.Row` documents each column. `what` is the kind of access, `how` the way to reboot,
`at` the index of the access: -2 and -1 before the reboot, 1 and 2 after it.
"""

import json

import pandas as pd

from rekindle_bench.report import Bar, Figure, Findings
from rekindle_lab.stats import median, p95

from .native import PEERS
from .plan import LIMITS
from .rows import WAYS

WARM, COLD = "warm-cache", "cold"
FIRST_READ_VS_COLD, FIRST_READ_VS_BEFORE = 8.7, 0.84
"""Bars: least ratio of the rate of the first warm read to the first cold read, and to the last read before."""
SLOWDOWN = 1.02
"""Bar: greatest ratio of durations."""
HELPER_BACK_MS = 200
"""Bar: greatest time until a killed server serves again, in ms."""
FIRST_S = 5
"""Seconds of a web server directly after a reboot whose rate counts."""
STEADY_S = 10
"""Seconds directly before a reboot with which the seconds after it are compared."""


def at_least(limit: float) -> Bar:
    """Returns the bar of a figure for which more is better."""
    return Bar(limit, ">=")


def rate(rows: pd.DataFrame) -> list[float]:
    """Returns the rate of each row in MB/s."""
    return [float(value) for value in rows["bytes"] / rows["us"]]


def where(frame: pd.DataFrame, **values: float | str) -> pd.DataFrame:
    """Returns the rows in which the columns of `values` have those values."""
    for key, value in values.items():
        frame = frame[frame[key] == value]
    return frame


def figures(frame: pd.DataFrame, raw: str) -> Findings:
    """Computes the figures, each with its bar. `raw`: name of the file of rows."""
    findings = Findings(raw)
    _first_read(frame, findings)
    _runs(frame, findings)
    _web(frame, findings)
    _map(frame, findings)
    _native(frame, findings)
    _memory(frame, findings)
    _helper(frame, findings)
    return findings


def _first_read(frame: pd.DataFrame, findings: Findings) -> None:
    kinds = [(case, limit, block) for case in ("files", "folios") for limit in LIMITS for block in (4096, 1 << 20)]
    for case, limit, block in kinds:
        of = where(frame, case=case, what="read", limit=limit, block=block)
        if not len(of) and (case, limit, block) != kinds[0]:
            continue
        tail = ("_xfs" if case == "folios" else "") + ("_1m" if block > 4096 else "")
        tail += "" if limit == kinds[0][1] else f"_{limit}"
        first, cold = rate(where(of, how=WARM, at=1)), rate(where(of, how=COLD, at=1))
        before = rate(where(of, how=WARM, at=-1))
        name = f"first_read_vs_cold{tail}"
        findings.ratio(
            name,
            at_least(FIRST_READ_VS_COLD),
            first,
            cold,
            "first read, warm",
            "first read, cold",
            of_peer=False,
            unit="MB/s",
        )
        name = f"first_read_vs_before{tail}"
        findings.ratio(
            name,
            at_least(FIRST_READ_VS_BEFORE),
            first,
            before,
            "first read, warm",
            "last read before",
            of_peer=False,
            unit="MB/s",
        )


def _runs(frame: pd.DataFrame, findings: Findings) -> None:
    warm = where(frame, case="tpch", how=WARM)
    after, before = ([float(us) / 1e6 for us in where(warm, at=at)["us"]] for at in (1, -1))
    findings.ratio(
        "tpch_after_vs_before",
        Bar(SLOWDOWN),
        after,
        before,
        "first run, warm",
        "last run before",
        of_peer=False,
        unit="s",
    )
    floor = [float(us) / 1e6 for us in where(frame, case="tpch", how="cold-read", at=1)["us"]]
    if floor:
        words = ("first run, warm", "first run, all read beforehand")
        findings.ratio("tpch_after_vs_floor", Bar(SLOWDOWN), after, floor, *words, of_peer=False, unit="s")


def _seconds(frame: pd.DataFrame, how: str) -> tuple[list[float], list[float]]:
    """Returns MB/s in the first seconds after each reboot, and in the last seconds before it."""
    after, before = [], []
    for _, rows in where(frame, case="http", what="http", how=how).groupby("round"):
        first = rows[(rows["second"] >= 1) & (rows["second"] <= FIRST_S)]
        last = rows[(rows["second"] < 0) & (rows["second"] >= -STEADY_S)]
        if len(first) and len(last):
            after.append(float(first["bytes"].sum()) / len(first) / 1e6)
            before.append(float(last["bytes"].sum()) / len(last) / 1e6)
    return after, before


def _web(frame: pd.DataFrame, findings: Findings) -> None:
    after, before = _seconds(frame, WARM)
    words = (f"the first {FIRST_S} s, warm", f"the last {STEADY_S} s before")
    findings.ratio("nginx_after_vs_before", at_least(0.95), after, before, *words, of_peer=False, unit="MB/s")


def _map(frame: pd.DataFrame, findings: Findings) -> None:
    names = {"read": "map_cost", "write": "map_cost_write", "bytes": "map_cost_bytes"}
    for what, name in names.items():
        rows = where(frame, case="map", what=what)
        ours, peer = ([float(us) / 1e6 for us in where(rows, how=how)["us"]] for how in ("map", "no-map"))
        findings.ratio(name, Bar(SLOWDOWN), ours, peer, "with the map", "without", of_peer=False, unit="s")


def _cost_us(rows: pd.DataFrame) -> float | None:
    """Returns the median processor time per request in us."""
    costs = (rows["cpu_us"] / rows["requests"]).dropna()
    return median([float(cost) for cost in costs]) if len(costs) else None


def _native(frame: pd.DataFrame, findings: Findings) -> None:
    names = {
        ("read", 4096): "native_vs_qsd",
        ("read", 1 << 20): "native_vs_qsd_1m",
        ("write", 4096): "native_vs_qsd_write",
        ("write", 1 << 20): "native_vs_qsd_write_1m",
    }
    for (what, block), name in names.items():
        rows = where(frame, case="native", what=what, block=block)
        ours, peers = where(rows, how="server"), {how: where(rows, how=how) for how in PEERS}
        # The fastest of the daemon's ways counts for this kind.
        best = max(PEERS, key=lambda how: median(rate(peers[how])) if len(peers[how]) else 0.0)
        peer, is_peer = peers[best], f"qemu-storage-daemon, {PEERS[best]}"
        costs = {"server_us_a_request": _cost_us(ours), "peer_us_a_request": _cost_us(peer)}
        extra = {key: cost for key, cost in costs.items() if cost is not None}
        findings.ratio(name, at_least(1.0), rate(ours), rate(peer), "server", is_peer, unit="MB/s", extra=extra)
    for name, how in (("attic_read_native", "attic"), ("attic_read_native_fresh", "attic-fresh")):
        rows = where(frame, how=how)
        if not len(rows):
            findings.report_missing(name)
            continue
        a_core = [float(value) for value in rows["bytes"] / rows["cpu_us"] / 1e3]
        extra = {"of_wall_time": median([value / 1e3 for value in rate(rows)])}
        n, bar = len(a_core), at_least(2.0)
        findings.add(Figure(name, median(a_core), "GB/s", n, p95(a_core), bar, findings.raw, extra=extra))


def taken(rows: pd.DataFrame) -> pd.Series:
    """Returns the host's memory in MiB for the guest, without the code that the emulation has translated."""
    return (rows["ram_kib"] + rows["private_kib"] - rows["code_kib"]) / 1024


def _memory(frame: pd.DataFrame, findings: Findings) -> None:
    rows = where(frame, case="files", what="memory", how=WARM)
    if not len(rows):
        findings.report_missing("host_memory_peak")
        return
    shares = [float(value) for value in (taken(rows) - 64) / rows["memory_mib"]]
    files = [float(value) for value in rows["ram_kib"] / 1024 / rows["memory_mib"]]
    extra = {"of_memory_files": max(files)}
    bar = Bar(1.05)
    findings.add_sample("host_memory_peak", "", shares, bar, value=max(shares), extra=extra)


def _helper(frame: pd.DataFrame, findings: Findings) -> None:
    kills = [float(us) / 1e3 for us in where(frame, case="helper", what="kill")["us"]]
    errors = where(frame, case="helper", what="verify")["errors"]
    if not kills or not len(errors):
        findings.report_missing("helper_back")
        return
    extra = {"worst": max(kills)}
    findings.add_sample("helper_back", "ms", kills, Bar(HELPER_BACK_MS), extra=extra)
    wrong = float(errors.sum())
    findings.add(Figure("helper_back_errors", wrong, "errors", len(kills), wrong, Bar(0), findings.raw))


def through_reboots(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of files that are read and written before and after a reboot; `on`: their file system."""
    rows = frame[frame["case"].isin(["files", "folios", "peers"]) & (frame["what"] != "memory")]
    return rows.assign(on=["XFS" if case == "folios" else "ext4" for case in rows["case"]])


def accesses(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the rates of each kind of access, before and after a reboot."""
    lines = []
    by = ["limit", "on", "what", "block", "how"]
    for (limit, on, what, block, how), of in through_reboots(frame).groupby(by, sort=False):
        line: dict[str, object] = {"disk": limit, "on": on, "access": what, "block": int(block), "reboot": how}
        for at in (-2, -1, 1, 2):
            values = rate(where(of, at=at))
            line[f"{at:+d}"] = median(values) if values else None
        line["n"] = len(where(of, at=1))
        lines.append(line)
    return lines


def table_1(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lays out the paper's table 1."""
    lines = []
    for how, of in where(frame, case="tpch").groupby("how", sort=False):
        line: dict[str, object] = {"reboot": how}
        for at in (-2, -1, 1, 2):
            values = [float(us) / 1e6 for us in where(of, at=at)["us"]]
            line[f"{at:+d}"] = median(values) if values else None
        lines.append({**line, "n": len(where(of, at=1))})
    return lines


def web(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the web server's rate before a reboot and in the first seconds after it."""
    lines = []
    for how in (WARM, COLD):
        after, before = _seconds(frame, how)
        if after:
            line = {"reboot": how, "before": median(before), f"first {FIRST_S} s": median(after), "n": len(after)}
            lines.append(line)
    return lines


def memory(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the memory that the host has used for each guest."""
    lines = []
    rows = where(frame, what="memory")
    for (case, how), of in rows.groupby(["case", "how"], sort=False):
        of = of.assign(taken=taken(of)).sort_values("taken")
        last = of.iloc[-1]
        line: dict[str, object] = {"case": case, "reboot": how, "guest": int(last["memory_mib"])}
        line |= {"memory files": last["ram_kib"] / 1024, "QEMU and server": last["private_kib"] / 1024}
        line |= {"of that translated code": last["code_kib"] / 1024, "all but that": float(last["taken"])}
        line |= {"out of the attic": float(of["bytes"].median()) / (1 << 20)}
        line |= {"host's cache of the image": float(of["cached_kib"].max()) / 1024, "n": len(of)}
        lines.append(line)
    return lines


def costs(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists the cost of the block map, in the guest and in the disk server."""
    lines = []
    for what, of in where(frame, case="map").groupby("what", sort=False):
        line: dict[str, object] = {"access": what}
        for how in ("map", "no-map"):
            rows = where(of, how=how)
            line[f"{how}, s"] = median([float(us) / 1e6 for us in rows["us"]])
            line[f"{how}, server's s"] = median([float(us) / 1e6 for us in rows["cpu_us"]])
        lines.append({**line, "n": len(where(of, how="map"))})
    return lines


def servers(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Lists rates and processor time of the disk servers."""
    lines = []
    for (what, block, how), of in where(frame, case="native").groupby(["what", "block", "how"], sort=False):
        line: dict[str, object] = {"access": what, "block": int(block), "server": how, "MB/s": median(rate(of))}
        a_core = [float(value) for value in of["bytes"] / of["cpu_us"] / 1e3]
        lines.append({**line, "GB/s a core": median(a_core), "us a request": _cost_us(of), "n": len(of)})
    return lines


def queries(frame: pd.DataFrame) -> dict[tuple[str, int], list[float]]:
    """Returns the medians of each query in ms, by way and access."""
    times_by_query: dict[tuple[str, int], list[float]] = {}
    for (how, at), of in where(frame, case="tpch").groupby(["how", "at"]):
        runs = [[step["us"] / 1e3 for step in json.loads(text)] for text in of["steps"]]
        times_by_query[how, int(at)] = [median(list(values)) for values in zip(*runs, strict=True)]
    return times_by_query


def ways(frame: pd.DataFrame) -> list[str]:
    """Returns the ways that have rows, in order."""
    return [way for way in WAYS if way in set(frame["how"])]
