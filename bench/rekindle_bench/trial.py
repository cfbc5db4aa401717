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

from rekindle_bench import cluster, faults, host, libvirt, metrics, move, protect, restore, store, vmm, warm_cache
from rekindle_bench import os as os_reboot
from rekindle_bench.case import Trial
from rekindle_bench.protect.plan import Pause, Units
from rekindle_bench.restore.plan import Piece
from rekindle_bench.warm_cache.plan import FileAccess

_ONCE = {"warm": 1, "cpr-transfer": 1, "saved": 1, "cold": 1}
"""One repetition of each way to replace a VMM."""

PLANS: dict[str, Any] = {
    "libvirt": libvirt.Plan(
        firsts={128: 1},
        agains={128: 1},
        saves={128: 1},
        away_domains=2,
        away_rounds=1,
        away_mib=128,
        pauses={128: libvirt.Checkpoints(rounds=1, checkpoints=1)},
        works_rounds=1,
        works_mib=128,
        overlay_rounds=1,
        overlay_mib=16,
        overlay_write_s=1,
        epochs=3,
        restores={128: 1},
        losses=3,
        losses_mib=192,
    ),
    "cluster": cluster.Plan(
        failovers=1,
        random_faults=1,
        output_commit_faults=1,
        control_kills=1,
        output_rounds=1,
        output_intervals_s=(0.2,),
        round_trip_window_s=1.0,
        throughput_window_s=1.0,
    ),
    "restore": restore.Plan(
        ways_by_mib={256: {"lazy": 1, "eager": 1, "incoming": 1}},
        touch={},
        stores=("disk", "slow", "s3"),
        store_restores=1,
        prepared_restores=1,
        # Two pairs, since the second pair starts with the remains of the first.
        crashes_by_workload={"compile": 2, "transcode": 1},
        pieces={
            "compile": Piece(count=40, units_before_crash=10),
            "transcode": Piece(count=200, units_before_crash=50),
        },
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
        # Two pairs, since the second pair starts with the remains of the first.
        sandbox_pairs=2,
        sandbox_rounds={"vmm": 1, "disk": 1, "protect": 1, "restore": 1},
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
            ("s3", "compile", "default"),
        ),
        pairs_by_workload={"compile": 1, "transcode": 1},
        rates=((0.0, 0.0), (10.0, 16.0)),
        rate_checkpoints=1,
        commits=1,
        encrypted_commits=1,
        compared_checkpoints=10,
    ),
    "os": os_reboot.Plan(rounds={"micro": 1}, leaks={"micro": 1}, peers={"micro": 1}, memory_mib=192, leak_mib=16),
    "store": store.Plan(commits=1, commit_bytes=1_000_000, restores=1, memory_mib=128, touch="16M", races=4),
    "move": move.Plan(filled_by_mib={192: "96M"}, loads_mb_per_s=(5,), rounds=1),
    "faults": faults.Plan(runs=1, unchecked=0, wait_s=0.5, kinds=("text", "panic", "cache", "none")),
    "host": host.Plan(ways_by_mib={}, ways_by_vms={}, rounds_in_a_row=0, emulated_faults=0, direct_faults=1),
    "metrics": metrics.Plan(guests=8, cost_windows=1, cost_s=2.0, scrape_s=1.0, loads=1, frame_windows=1, frames_s=2.0),
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

ERROR_TAIL_LINES = 10
"""Number of lines that are printed of a trial that ended without a report."""


def trial(topic: str) -> Trial:
    """Returns the trial of a topic: the cases that it omits."""
    return Trial(NOT_TRIED.get(topic, {}))


def run_all(topics: Sequence[str], words: Sequence[str], out: Path) -> int:
    """Runs the trials of these topics, each in a separate process; returns how many failed.

    `words`: options for each topic. A topic's output is in `out`/TOPIC.log; if the topic fails, it is printed, too.
    """
    trials = _Trials(topics, words, out)
    began = time.monotonic()
    lanes = [threading.Thread(target=trials.run_until_none_waits) for _ in range(LANES)]
    for lane in lanes:
        lane.start()
    try:
        # Short waits, so that an interrupt is noticed soon.
        while any(lane.is_alive() for lane in lanes):
            lanes[0].join(0.2)
            lanes[-1].join(0.2)
    except KeyboardInterrupt:
        trials.stop()
        for lane in lanes:
            lane.join()
        raise
    summary = f"failed: {', '.join(trials.failed)}" if trials.failed else "all of them work"
    # They are in the outputs above, too, but a reader may have only the end of this one.
    for topic, errors in trials.failed.items():
        for error in errors:
            print(f"  {topic}: {error}", flush=True)
    print(f"trial of {len(topics)} benchmarks in {time.monotonic() - began:.0f} s: {summary}", flush=True)
    return len(trials.failed)


class _Trials:
    """Trials that wait, run and have failed. Several threads call `run_until_none_waits` at the same time."""

    def __init__(self, topics: Sequence[str], words: Sequence[str], out: Path) -> None:
        self.failed: dict[str, list[str]] = {}
        """The errors of the trials that failed, by topic."""
        self._words = words
        self._out = out
        self._lock = threading.Lock()
        """Held while topics are taken or stopped, and while output is printed."""
        self._waiting = list(topics)
        self._processes: list[subprocess.Popen[bytes]] = []

    def run_until_none_waits(self) -> None:
        """Runs one trial after the other."""
        while True:
            began = time.monotonic()
            with self._lock:
                if not self._waiting:
                    return
                topic = self._waiting.pop(0)
                process = self._start(topic)
                self._processes.append(process)
            status = process.wait()
            with self._lock:
                self._report(topic, status, time.monotonic() - began)

    def _log(self, topic: str) -> Path:
        return self._out / f"{topic}.log"

    def _start(self, topic: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rekindle_bench", topic, "--out", str(self._out), *self._words]
        with self._log(topic).open("w") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, "TRIAL": "1"}, start_new_session=True
            )

    def _report(self, topic: str, status: int, duration_s: float) -> None:
        """Prints the outcome of a trial, with its output if it has failed, and the cases that it has omitted."""
        log = self._log(topic)
        if status != 0:
            self.failed[topic] = errors_of(log)
            print(f"--- {topic}: failed after {duration_s:.0f} s:\n{log.read_text()}", flush=True)
        else:
            print(f"{topic}: {duration_s:.0f} s", flush=True)
        for line in left_out(log):
            print(f"  {topic}: {line}", flush=True)

    def stop(self) -> None:
        """Starts no further trials, and terminates those that run; each removes everything that it has created."""
        with self._lock:
            self._waiting.clear()
        for process in self._processes:
            process.terminate()


def left_out(log: Path) -> list[str]:
    """Returns the cases that a trial has omitted, from the JSON line at the end of its output."""
    omitted = _report_of(log).get("left_out", [])
    return [line for line in omitted if line.startswith(("case ", "slow stores"))]


def errors_of(log: Path) -> list[str]:
    """Returns the errors of a trial from the JSON line at the end of its output; without one, its last lines."""
    return _report_of(log).get("errors") or log.read_text().splitlines()[-ERROR_TAIL_LINES:]


def _report_of(log: Path) -> dict[str, Any]:
    lines = log.read_text().splitlines()
    try:
        report = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
