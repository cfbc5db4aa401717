"""Executes one run of an experiment with a guest of Rekindle (`GuestRunner`).

A run has these steps, each in fresh folders and with a new guest:

1. Boot, then warm-up: load that is not measured.
2. First window: load and samples of resource use before the action (responses `IN_WINDOW`).
3. Action: a reboot of the OS or of the VMM, with a client at the guest (responses `OF_ACTION`).
4. Second window: load after the action (responses `AFTER`).

Terms: the responses are the numbers that the experiment measures, and a window without a measured response is omitted.
`settings` are those of the run's factor levels, such as `{"reboot": "os", "how": "kexec"}`; `settings.py` lists them.
Phases are the points of its boot at which a guest saves a snapshot, to resume from it in a later reboot.
"""

import hashlib
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab.experiment import action, load, subject
from rekindle_lab.experiment.definition import Experiment
from rekindle_lab.experiment.inside import GuestStatus
from rekindle_lab.experiment.order import Planned
from rekindle_lab.experiment.runner import Measured, RunError
from rekindle_lab.experiment.sampling import Sampler
from rekindle_lab.experiment.settings import AFTER, IN_WINDOW
from rekindle_lab.experiment.subject import NAME, Subject
from rekindle_lab.leak import Leaky, leak_image, leaky
from rekindle_lab.machine import machine_versions, qemu_version
from rekindle_lab.os_guest import wait_saved
from rekindle_lab.protector import Protector, protected
from rekindle_lab.rekindle import Rekindle, RekindleError
from rekindle_lab.runs.processes import mentioning
from rekindle_lab.runs.workspace import Workspace
from rekindle_lab.stores import on_disk

DIGEST_DIGITS = 12
"""Hexadecimal digits of a binary's digest in a run's record: short, and still different for any two builds."""


@dataclass
class GuestRunner:
    """Executes runs with guests. Needs root, for taps and network namespaces."""

    experiment: Experiment
    root: Path
    """Folder of the project."""
    binary: Path
    """The `rekindle` binary."""
    qemu: str
    """Path of the QEMU binary."""
    disk: Path
    """Folder on a real disk, for copies of the guest's disk and for stores."""
    key: str
    """Prefix that makes the names of this experiment's runs unique."""

    def versions(self) -> dict[str, str]:
        """Returns the versions of everything that takes part in a run."""
        guest_spec = self.experiment.guest
        versions = {
            "rekindle": f"{Rekindle(self.binary, self.root).version()} ({_digest(self.binary)})",
            "qemu": qemu_version(self.qemu),
            "image": subject.image(self.root, guest_spec).folder.name,
            **machine_versions(),
        }
        if guest_spec.leak_mib:
            versions["leak"] = leak_image(self.root).name
        if guest_spec.load == "wrk":
            versions["wrk"] = _wrk_version()
        return versions

    def leftovers(self, planned: Planned, attempt: int) -> dict[str, Any]:
        """Returns the names of the namespace and the folders that the run will make.

        The names are recorded before the run starts, so that `clear` can remove everything after a kill.
        """
        name = f"rkx-{self.key}-{planned.run}-{attempt}"
        return {"netns": name, "work": f"/dev/shm/{name}", "disk": str(self.disk / name)}

    def clear(self, leftovers: dict[str, Any]) -> None:
        """Ends the VM of a run and all processes that a kill has left; removes the run's folders and its namespace."""
        try:
            Workspace.from_leftovers(self.binary, leftovers).remove()
        except RekindleError as error:
            raise RunError(str(error)) from error

    def run(self, planned: Planned, settings: dict[str, Any], leftovers: dict[str, Any]) -> Measured:
        """Executes one run."""
        del planned  # part of the interface; the settings and the names are enough here
        try:
            with Workspace.from_leftovers(self.binary, leftovers).created() as space:
                return self._run_in(space, settings)
        except RekindleError as error:
            raise RunError(str(error)) from error
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error

    def _run_in(self, space: Workspace, settings: dict[str, Any]) -> Measured:
        """Boots the guest, then executes the steps that the settings and the responses require."""
        guest_spec = self.experiment.guest
        image = subject.image(self.root, guest_spec)
        (netns,) = space.namespaces
        guest = subject.subject(guest_spec, settings, image, netns=netns, ram=space.ram, disk=space.disk)
        rekindle = Rekindle(self.binary, space.work / "run")
        rekindle.run(guest.write(space.work, self.qemu))
        guest.wait_ready()
        if guest.phases:  # otherwise the first window would include the saving
            wait_saved(rekindle, guest)
        measured = Measured()
        with ExitStack() as stack:
            protector = None
            if "protect_every" in settings:
                store, every = on_disk(space.disk / "store"), settings["protect_every"]
                protector = stack.enter_context(protected(rekindle, NAME, store, every))
            self._measure_before_action(rekindle, guest, space.work, measured, protector)
            if "reboot" in settings:
                self._do_action(rekindle, guest, settings, measured)
        return measured

    def _measures_any_of(self, names: tuple[str, ...]) -> bool:
        return any(name in names for name in self.experiment.responses)

    def _measure_before_action(
        self, rekindle: Rekindle, guest: Subject, work: Path, measured: Measured, protector: Protector | None
    ) -> None:
        """Warms up, then measures throughput and response time under load, with samples of host and guest."""
        guest_spec = self.experiment.guest
        with ExitStack() as stack:
            status = None
            if self._measures_any_of(IN_WINDOW) and guest.kind != "micro":  # micro does not report them
                status = stack.enter_context(GuestStatus(guest))
            stack.enter_context(load.without_caches(guest, guest_spec.drop_caches_every_s))
            warm_up = load.measure(rekindle, guest, guest_spec, guest_spec.warm_up_s)
            measured.samples.append({"warm_up": warm_up.raw})
            if not self._measures_any_of(IN_WINDOW):
                return
            checkpoints_before = len(protector.of("checkpoint")) if protector else 0
            sample_guest = status.take if status else None
            with Sampler(guest_spec.sample_every_s, lambda: mentioning(str(work)), sample_guest) as sampler:
                window = load.measure(rekindle, guest, guest_spec, guest_spec.measure_s)
        measured.samples += [*sampler.samples, {"load": window.raw}]
        measured.responses |= sampler.responses()
        if status:
            measured.responses |= status.responses([sample["guest"] for sample in sampler.samples])
        measured.responses |= {
            "throughput_per_s": window.throughput_per_s,
            "response_time_ms": window.response_time_ms,
            "failed_requests": float(window.failed),
        }
        if protector is not None:
            checkpoints = protector.of("checkpoint")[checkpoints_before:]
            measured.samples.append({"checkpoints": checkpoints})
            if not checkpoints:
                raise RunError(f"{NAME}: no checkpoint in the window, so it was not protected", measured=measured)

    def _do_action(self, rekindle: Rekindle, guest: Subject, settings: dict[str, Any], measured: Measured) -> None:
        """Reboots the guest, after a leak if configured, and then measures the second window.

        With a leak, the guest is rebooted twice in the same way: first to get a reference, then, after the leak, as the
        measured action. The reference is needed because a kernel's slabs (memory of its own objects) differ between
        ways to boot, by more than what remains of the leak.
        """
        guest_spec = self.experiment.guest
        leak = None
        if guest_spec.leak_mib:
            before_leak = Measured()
            try:
                action.reboot(rekindle, guest, guest_spec, settings, before_leak)
            finally:
                measured.samples.append({"before_leak": before_leak.samples})
            leak = _Leak(guest, self.root, guest_spec.leak_mib)
        action.reboot(rekindle, guest, guest_spec, settings, measured)
        if leak is not None:
            leak.add_responses(measured)
        if self._measures_any_of(AFTER):
            window = load.measure(rekindle, guest, guest_spec, guest_spec.after_s)
            measured.samples.append({"after": window.raw})
            measured.responses["throughput_after_per_s"] = window.throughput_per_s
            measured.responses["response_time_after_ms"] = window.response_time_ms


class _Leak:
    """A leak of kernel memory, made in one step, and how much of it a reboot recovers."""

    def __init__(self, guest: Subject, root: Path, mib: int) -> None:
        self.guest: Leaky = leaky(guest, leak_image(root))
        self.before = self.guest.memory()
        self.leaked_bytes = self.guest.leak(mib)
        self.with_leak = self.guest.memory()

    def add_responses(self, measured: Measured) -> None:
        """Adds the responses: computed from the kernel's allocations and, as in the paper, from free memory."""
        after = self.guest.memory()
        memory_kib = [
            {"slab": memory.slab_kib, "available": memory.available_kib}
            for memory in (self.before, self.with_leak, after)
        ]
        measured.samples.append({"leaked_bytes": self.leaked_bytes, "memory_kib": memory_kib})
        leaked_kib = self.leaked_bytes / 1024
        remaining_kib = after.slab_kib - self.before.slab_kib
        regained_kib = after.available_kib - self.with_leak.available_kib
        measured.responses["recovered_memory_pct"] = 100 * (1 - remaining_kib / leaked_kib)
        measured.responses["recovered_available_pct"] = 100 * regained_kib / leaked_kib


def _digest(binary: Path) -> str:
    """Returns a digest that distinguishes two builds of one version."""
    with binary.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:DIGEST_DIGITS]}"


def _wrk_version() -> str:
    """Returns the version in the first line of wrk's output."""
    completed = subprocess.run(["wrk", "--version"], capture_output=True, text=True, check=False)
    return (completed.stdout or completed.stderr).split("Copyright")[0].strip()
