"""The case of table 1: the 22 queries of TPC-H one after the other, before and after a reboot."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.rekindle import RekindleError

from .cache_guests import CacheEnvironment, CacheGuest
from .plan import Plan
from .rows import Row
from .ways import COLD, WARM, turns

TPCH = Path(__file__).parent / "tpch"
MEMORY_MIB = 1024
QUERIES = 22
COLD_READ = "cold-read"
"""Way: a cold reboot, after which all files of the database are read before the first run, so that no disk counts."""
READ_ALL = "find /var/lib/postgresql /usr/lib/postgresql /usr/lib/x86_64-linux-gnu -type f -exec cat {} + >/dev/null"


@dataclass(frozen=True)
class PowerRun:
    """One run of all queries."""

    took_us: int
    steps: list[dict[str, Any]]
    """Duration of each query."""


def run_queries(guest: CacheGuest) -> PowerRun:
    """Runs all queries in the guest, one after the other."""
    queries = "".join(path.read_text() for path in sorted(TPCH.glob("q*.sql")))
    script = f"cat >/run/tpch.sql <<'SQL'\n\\set ON_ERROR_STOP on\n\\timing on\n\\o /dev/null\n{queries}\nSQL\n"
    script += "date +%s.%N; psql -U postgres -h /var/run/postgresql -f /run/tpch.sql tpch; date +%s.%N"
    lines = guest.ssh(script).split("\n")
    times_ms = [float(time[1]) for line in lines if (time := re.match(r"Time: ([0-9.]+) ms", line))]
    stamps_s = [float(line) for line in lines if re.fullmatch(r"\d+\.\d+", line)]
    if len(times_ms) != QUERIES or len(stamps_s) != 2:
        raise RekindleError(f"tpch: {len(times_ms)} of {QUERIES} queries have a time")
    steps = [{"step": f"Q{number}", "us": round(ms * 1000)} for number, ms in enumerate(times_ms, 1)]
    return PowerRun(round((stamps_s[1] - stamps_s[0]) * 1e6), steps)


def tpch(env: CacheEnvironment, plan: Plan) -> None:
    """Measures runs of all queries around each reboot. In the rows, `at` is -2, -1, 1 and 2: index of the run."""
    limit = plan.limits[0]
    with env.on_limited_disk(env.cached("tpch", MEMORY_MIB, 5), limit) as guest:

        def measure(how: str, round_number: int, index: int) -> None:
            run = run_queries(guest)
            served = env.from_retained_cache(guest) if index == 1 and how == WARM else None
            columns = {"memory_mib": guest.memory_mib, "bytes": served, "us": run.took_us, "steps": run.steps}
            env.rows.append(
                Row(case="tpch", what="tpch", how=how, limit=limit, round=round_number, at=index, **columns)
            )

        run_queries(guest)  # fills the guest's cache
        for round_number in range(plan.tpch_rounds):
            for how in turns(round_number, (WARM, COLD, COLD_READ)):
                for index in range(-plan.tpch_runs, 0):
                    measure(how, round_number, index)
                env.reboot(guest, WARM if how == WARM else COLD)
                if how == COLD_READ:
                    guest.ssh(READ_ALL)
                for index in range(1, plan.tpch_runs + 1):
                    measure(how, round_number, index)
            env.log(f"tpch: {round_number + 1} of {plan.tpch_rounds}")
