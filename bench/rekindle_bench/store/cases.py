"""The cases of an object store, listed in `CASES` at the end.

Each starts an object store of its own. Rekindle's commands and the load (`crates/store/examples/object_store_load.rs`)
run on this machine, too.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rekindle_bench.restore.crashed_guests import RestoreEnvironment
from rekindle_lab.protector import protected
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.stores import Store, in_object_store

from .plan import Plan
from .rows import Row

IMAGE = "micro"
INDEX = 22
"""Network of the guest: `Guest.index`."""
CHECKPOINTS = 3
"""Checkpoints of the guest before it is restored."""
LOAD_DEADLINE_S = 4 * 3600.0


@contextmanager
def _bucket(env: RestoreEnvironment) -> Iterator[Store]:
    with in_object_store(env.rekindle.binary.parent / "examples", env.work) as bucket:
        yield bucket


def _load(env: RestoreEnvironment, store: Store, *words: str) -> Iterator[dict[str, Any]]:
    """Runs a load, and returns each of its measurements."""
    assert store.bucket is not None
    command = [str(env.rekindle.binary.parent / "examples" / "object_store_load"), *words]
    with subprocess.Popen(
        command,
        env={**os.environ, **store.bucket.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            yield from map(json.loads, process.stdout)
            problem = process.stderr.read()
            if process.wait(LOAD_DEADLINE_S) != 0:
                raise RekindleError(f"{' '.join(command)}: {problem.strip()}")
        finally:
            process.kill()


def commit(env: RestoreEnvironment, plan: Plan) -> None:
    """Measures commits of checkpoints that do not compress, by turns with a plain PUT of as many bytes."""
    with _bucket(env) as bucket:
        store = bucket.fresh("commit")
        for done in _load(env, store, "commit", store.url, str(plan.commits), str(plan.commit_bytes)):
            env.rows.append(
                Row(case="commit", how=done["how"], round=done["round"], took_us=done["us"], bytes=done["bytes"])
            )


def owners(env: RestoreEnvironment, plan: Plan) -> None:
    """Lets two hosts race to own a store."""
    with _bucket(env) as bucket:
        store = bucket.fresh("owners")
        for race in _load(env, store, "race", store.url, str(plan.races)):
            row = Row(case="owners", how=race["how"], round=race["round"], took_us=race["us"], owners=race["owners"])
            row.error = race["error"] or ""
            env.rows.append(row)


def restore(env: RestoreEnvironment, plan: Plan) -> None:
    """Restores a guest from the object store, which has the checkpoints in memory."""
    env.need(memory_mib=4 * plan.memory_mib, disk_mib=2 * plan.memory_mib)
    guest = env.guest("objects", IMAGE, plan.memory_mib, INDEX, plan.touch)
    with _bucket(env) as bucket, env.ours(guest):
        store = bucket.fresh(guest.name)
        with protected(env.rekindle, guest.name, store, "1s", None, "--count", str(CHECKPOINTS)) as protector:
            protector.wait("checkpoint", CHECKPOINTS)
            protector.join()
        for round_number in range(plan.restores):
            env.log(f"restore: round {round_number + 1} of {plan.restores}")
            env.crash(guest.name)
            restored = env.restore(guest.name, store)
            filled = env.wait_filled(guest.name, restored.resumed_host_us)
            row = Row(case="restore", how=store.kind, round=round_number, took_us=restored.restore_us)
            row.fill_us, row.worst_us, row.steps = filled.fill_us, filled.worst_us, restored.steps
            env.rows.append(row)


CASES: dict[str, Callable[[RestoreEnvironment, Plan], None]] = {
    "commit": commit,
    "restore": restore,
    "owners": owners,
}
