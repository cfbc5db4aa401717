"""A guest of the checkpoint benchmark with its workloads, the stores, and rows from a protector's events."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rekindle_bench.environment import Environment, Setup
from rekindle_lab.guests import Guest
from rekindle_lab.protector import Protector
from rekindle_lab.qmp import Qmp
from rekindle_lab.slow import can_be_slow
from rekindle_lab.stores import Store, encrypted, in_object_store, on_disk, on_slow_disk
from rekindle_lab.work import Work

from .rows import DEFAULT, Row

IMAGE = "debian-work"
AnyProtectEnvironment = TypeVar("AnyProtectEnvironment", bound="ProtectEnvironment")


@dataclass
class ProtectEnvironment(Environment):
    """The environment of the checkpoint benchmark: working guests, and the stores for their checkpoints."""

    _closing: ExitStack
    """Closes the stores at the end of the run."""
    _stores: dict[str, Store] = field(default_factory=dict)
    """Stores that are made, by kind."""
    _object_store: ExitStack = field(default_factory=ExitStack)
    """Ends the object store."""

    def has_store(self, kind: str) -> bool:
        """Returns whether this machine can have stores of this kind; if not, records the omission."""
        if kind != "slow" or can_be_slow():
            return True
        line = "slow stores: this machine has no block I/O controller of control groups v1"
        if line not in self.left_out:
            self.left_out.append(line)
        return False

    def store(self, kind: str) -> Store:
        """Returns a folder for stores of a kind (`disk`, `slow`, `s3`, `encrypted`), made at the first call."""
        if kind not in self._stores:
            if kind == "disk":
                store = on_disk(self.disk_dir / "stores")
            elif kind == "encrypted":
                store = encrypted(self.rekindle, self.disk_dir / "encrypted")
            elif kind == "slow":
                store = self._closing.enter_context(on_slow_disk(self.disk_dir / "slow"))
            elif kind == "s3":
                programs = self.rekindle.binary.parent / "examples"
                self._closing.callback(self._object_store.close)
                store = self._object_store.enter_context(in_object_store(programs, self.work))
            else:
                raise ValueError(f"no kind of store: {kind}")
            self._stores[kind] = store
        return self._stores[kind]

    def end_object_store(self) -> None:
        """Ends the object store, if it runs: its daemons take processor time from what is measured next."""
        self._object_store.close()
        self._stores.pop("s3", None)

    @contextmanager
    def working(self, name: str, memory_mib: int, index: int, touch: str | None = None) -> Iterator[tuple[Guest, Work]]:
        """Starts a guest that can compile and transcode."""
        self.need(memory_mib=memory_mib, disk_mib=2 * memory_mib)
        guest = self.guest(name, IMAGE, memory_mib, index, touch)
        with self.ours(guest):
            yield guest, Work(guest, self.rekindle.run_dir)

    def qmp(self, guest: Guest) -> Qmp:
        """Connects to the guest's QEMU. Rekindle must not use that QEMU meanwhile."""
        return Qmp(Path(self.rekindle.show(guest.name)["vmm"]["directory"]) / "qmp.sock")

    def checkpoints(self, protector: Protector, skip: int = 0, **common: Any) -> int:  # noqa: ANN401
        """Appends a row for each checkpoint that the protector has reported, except the first `skip`.

        `common`: further columns. Returns the number of rows.
        """
        events = protector.of("checkpoint")[skip:]
        for event in events:
            same_names = {name: event[name] for name in Row.__dataclass_fields__ if name in event}
            columns = {**same_names, **common, "full": int(event["full"]), "stop_host_us": event["stopped_host_us"]}
            columns["steps"] = [{"step": name, "us": us} for name, us in event["steps"].items()]
            self.rows.append(Row(what="checkpoint", **columns))
        return len(events)


def span(seconds: float) -> str:
    """Formats a time for the command line, which accepts only whole numbers."""
    return f"{round(seconds * 1000)}ms"


def policy(how: str) -> str | None:
    """Returns the value of `--policy` for a way; `None` for the default."""
    return None if how == DEFAULT else how


@contextmanager
def environment_of(kind: type[AnyProtectEnvironment], setup: Setup) -> Iterator[AnyProtectEnvironment]:
    """Sets up an environment of a kind: folders, a tmpfs for guest RAM, a network namespace."""
    with setup.workspace() as space, ExitStack() as closing:
        yield setup.environment(kind, space, _closing=closing)


environment = partial(environment_of, ProtectEnvironment)
"""Sets up the environment of topic `protect`."""
