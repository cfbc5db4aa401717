"""The trial of the benchmarks (`TRIAL=1`): every case once, with the smallest guest, for the shortest time.

A trial shows that each case still works: that it ends without an error and leaves rows, each of which is plausible
(`plausible`), and that the analysis accepts the rows. Times in a trial mean nothing. `make test` runs all trials (part
`benches`), three topics at a time, with a debug build. `micro` replaces the Debian guests (tests/images/stand-in).
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rekindle_bench import cluster, faults, host, libvirt, move, protect, restore, vmm, warm_cache
from rekindle_bench import os as os_reboot
from rekindle_bench.case import Trial
from rekindle_bench.protect.plan import Pause, Units
from rekindle_bench.restore.plan import Piece
from rekindle_bench.warm_cache.plan import FileAccess

_ONCE = {"warm": 1, "cpr-transfer": 1, "saved": 1, "cold": 1}
"""One repetition of each way to replace a VMM."""

PLANS: dict[str, Any] = {
    "cluster": cluster.Plan(
        failovers=1, faults=1, held=1, held_off=1, output_rounds=1, output_every_s=(0.2,), trips_s=1.0, many_s=1.0
    ),
    "restore": restore.Plan(
        ways_by_mib={256: {"lazy": 1, "eager": 1, "incoming": 1}},
        touch={},
        stores=("disk", "slow", "tls"),
        store_restores=1,
        prepared_restores=1,
        # Two pairs, since the second pair starts with the remains of the first.
        crashes_by_workload={"compile": 2, "transcode": 1},
        pieces={"compile": Piece(count=40, cut=10), "transcode": Piece(count=200, cut=50)},
        units=Units(compile=40, transcode=200),
    ),
    "warm-cache": warm_cache.Plan(
        native_windows=1,
        native_s=0.2,
        retained_reads=1,
        files=(
            FileAccess("read", block=4096, mib=16, rounds=1),
            FileAccess("read", block=1024, mib=4, rounds=1),
            FileAccess("write", block=4096, mib=16, rounds=1),
            FileAccess("mmap-read", block=4096, mib=16, rounds=1),
        ),
        limits=("paper", "cloud"),
        folios=(),
        peers=(FileAccess("read", block=4096, mib=16, rounds=1),),
        map_rounds=1,
        map_mib=16,
        tpch_rounds=0,
        tpch_runs=0,
        http_rounds=1,
        http_s=2,
        memory_mib=256,
        span_mib=128,
        web_files=20,
        kills=2,
    ),
    "vmm": vmm.Plan(
        ways_by_mib={128: _ONCE},
        size_rounds=1,
        ways_by_vms={2: {"warm": 1, "cpr-transfer": 1}},
        debian_ways=_ONCE,
        rounds_under_load=1,
        compared_rounds=1,
        ways_over_time=tuple(_ONCE),
        smallest_largest_mib=(128, 256),
    ),
    "protect": protect.Plan(
        units=Units(compile=10, transcode=50),
        pauses_by_mib={
            512: Pause(rounds=1, checkpoints=1, saves={"background-snapshot": 1, "mapped-ram": 1, "full": 1})
        },
        intervals_s=(0.25,),
        cells=(
            ("disk", "compile", "default"),
            ("disk", "transcode", "cow"),
            ("slow", "compile", "basic"),
            ("tls", "compile", "default"),
        ),
        pairs_by_workload={"compile": 1, "transcode": 1},
        rates=((0.0, 0.0), (10.0, 16.0)),
        rate_checkpoints=1,
        commits=1,
        compared_checkpoints=10,
    ),
    "libvirt": libvirt.Plan(
        firsts={128: 1},
        agains={128: 1},
        saves={128: 1},
        away_domains=2,
        away_rounds=1,
        away_mib=128,
        pauses={128: libvirt.Checkpoints(rounds=1, checkpoints=1)},
    ),
    "os": os_reboot.Plan(rounds={"micro": 1}, leaks={"micro": 1}, peers={"micro": 1}, memory_mib=192, leak_mib=16),
    "move": move.Plan(sizes={192: "96M"}, loads=(5,), rounds=1),
    "faults": faults.Plan(runs=1, unchecked=0, wait_s=0.5, kinds=("text", "panic", "cache", "none")),
    "host": host.Plan(ways_by_mib={}, ways_by_vms={}, rounds_in_a_row=0, emulated_faults=0, direct_faults=1),
}
"""Plans by topic. The slowest topics come first, so that all lanes end at about the same time."""

_DISTRIBUTION = "its reboots in every way take minutes without KVM; part `unit` of make test reboots `immutable`"
_EMULATED = "the emulated host takes minutes; part `host` of make test reboots it"
NOT_TRIED: dict[str, dict[str, str]] = {
    "warm-cache": {"folios": "micro has no XFS", "tpch": "micro has no PostgreSQL"},
    "os": {"immutable": _DISTRIBUTION, "debian": _DISTRIBUTION},
    "host": {"counts": _EMULATED, "sizes": _EMULATED, "losses": _EMULATED},
}
"""Cases that a trial omits, by topic, each with the reason."""

LANES = 3
"""Number of topics that run concurrently. A topic mostly waits, so they hardly slow each other down."""


def trial(topic: str) -> Trial:
    """Returns the trial of a topic: the cases that it omits."""
    return Trial(NOT_TRIED.get(topic, {}))


def run_all(topics: Sequence[str], words: Sequence[str], out: Path) -> int:
    """Runs the trials of these topics, each in a separate process; returns how many failed.

    `words`: options for each topic. A topic's output is in `out`/TOPIC.log; if the topic fails, it is printed, too.
    """
    waiting, lock = list(topics), threading.Lock()
    failed: list[str] = []
    processes: list[subprocess.Popen[bytes]] = []
    began = time.monotonic()

    def lane() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                topic, since = waiting.pop(0), time.monotonic()
                log = out / f"{topic}.log"
                command = [sys.executable, "-m", "rekindle_bench", topic, "--out", str(out), *words]
                with log.open("w") as file:
                    process = subprocess.Popen(
                        command, stdout=file, stderr=file, env={**os.environ, "TRIAL": "1"}, start_new_session=True
                    )
                processes.append(process)
            status = process.wait()
            with lock:
                duration = f"{time.monotonic() - since:.0f} s"
                if status != 0:
                    failed.append(topic)
                    print(f"--- {topic}: failed after {duration}:\n{log.read_text()}", flush=True)
                else:
                    print(f"{topic}: {duration}", flush=True)
                for line in left_out(log):
                    print(f"  {topic}: {line}", flush=True)

    lanes = [threading.Thread(target=lane) for _ in range(LANES)]
    for lane_thread in lanes:
        lane_thread.start()
    try:
        # Short waits, so that an interrupt is noticed soon.
        while any(lane_thread.is_alive() for lane_thread in lanes):
            lanes[0].join(0.2)
            lanes[-1].join(0.2)
    except KeyboardInterrupt:
        with lock:
            waiting.clear()
        for process in processes:
            process.terminate()  # the process then removes everything that it has made
        for lane_thread in lanes:
            lane_thread.join()
        raise
    summary = f"failed: {', '.join(failed)}" if failed else "all of them work"
    print(f"trial of {len(topics)} benchmarks in {time.monotonic() - began:.0f} s: {summary}", flush=True)
    return len(failed)


def left_out(log: Path) -> list[str]:
    """Returns the cases that a trial has omitted, from the JSON line at the end of its output."""
    lines = log.read_text().splitlines()
    try:
        omitted = json.loads(lines[-1])["left_out"] if lines else []
    except (ValueError, TypeError, KeyError):
        return []
    return [line for line in omitted if line.startswith(("case ", "slow stores"))]
