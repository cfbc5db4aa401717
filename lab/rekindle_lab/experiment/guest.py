"""A run with a guest of Rekindle's: fresh state, warm-up, load and samples, the level's action with a client at it.

Settings of a level: `reboot` (`os` or `vmm`; without it nothing is rebooted), `how` (of that reboot), `options` (more
of its arguments), `protect_every` (a protector beside, `"2s"`), `disk_server` (Rekindle serves the disk), `touch`
(memory that the guest fills), `definition` (lines of TOML for the VM's definition).
"""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab import guests, netns
from rekindle_lab.bench.report import machine_versions, qemu_version
from rekindle_lab.experiment.definition import DefinitionError, Experiment
from rekindle_lab.experiment.inside import GuestStatus
from rekindle_lab.experiment.order import Planned
from rekindle_lab.experiment.runner import Measured, RunError
from rekindle_lab.experiment.sampling import Sampler, processes_with
from rekindle_lab.protector import protected
from rekindle_lab.rekindle import Rekindle, RekindleError, failed_requests, gap_around
from rekindle_lab.stores import on_disk

SETTINGS = {
    "reboot": str,
    "how": str,
    "options": list,
    "protect_every": str,
    "disk_server": bool,
    "touch": str,
    "definition": str,
}
NAME = "subject"
RESPONSES = (
    "throughput_per_s",
    "response_time_ms",
    "downtime_s",
    "failed_requests",
    "host_cpu_pct",
    "host_resident_kib",
    "host_read_bytes",
    "host_written_bytes",
    "guest_cpu_pct",
    "guest_load",
    "guest_free_kib",
    "guest_io_blocks",
)
IN_GUEST = tuple(name for name in RESPONSES if name.startswith("guest_"))


def check(experiment: Experiment) -> None:
    """Raise `DefinitionError` for what this runner does not know, before anything is drawn or run."""
    for factor in experiment.factors:
        for level, settings in factor.levels.items():
            where = f"factor '{factor.name}', level '{level}'"
            for key, value in settings.items():
                if key not in SETTINGS:
                    raise DefinitionError(f"{where}: unknown setting '{key}'; there are: {', '.join(SETTINGS)}")
                if not isinstance(value, SETTINGS[key]):
                    raise DefinitionError(f"{where}: {key}: {value!r} is not of the kind {SETTINGS[key].__name__}")
    for name in experiment.responses:
        if name not in RESPONSES:
            raise DefinitionError(f"response: unknown '{name}'; a guest has: {', '.join(RESPONSES)}")
        if name in IN_GUEST and not experiment.guest.image.startswith("debian"):
            raise DefinitionError(
                f"response: '{name}' needs a debian image; {experiment.guest.image} tells nothing of it"
            )
    for treatment in experiment.treatments():
        if "downtime_s" in experiment.responses and not experiment.settings(treatment).get("reboot"):
            raise DefinitionError(f"response: 'downtime_s', but treatment {treatment} reboots nothing")


@dataclass
class GuestRunner:
    """Runs with guests. Needs root, for taps and network namespaces."""

    experiment: Experiment
    root: Path
    binary: Path
    qemu: str
    disk: Path
    """A folder on a real disk, for copies of the guest's disk and stores."""
    key: str
    """Makes names of this experiment's runs its own."""

    def versions(self) -> dict[str, str]:
        """Of all that takes part."""
        return {
            "rekindle": Rekindle(self.binary, self.root).version(),
            "qemu": qemu_version(self.qemu),
            "image": guests.build(self.root, self.experiment.guest.image).folder.name,
            **machine_versions(),
        }

    def leaves(self, planned: Planned, attempt: int) -> dict[str, Any]:
        """Names of the namespace and folders that the run will make."""
        name = f"rkx-{self.key}-{planned.run}-{attempt}"
        return {"netns": name, "work": f"/dev/shm/{name}", "disk": str(self.disk / name)}

    def clear(self, leaves: dict[str, Any]) -> None:
        """End the VM of a run that was killed, and remove its folders and its namespace."""
        work = Path(leaves["work"])
        if (work / "run").exists():
            rekindle = Rekindle(self.binary, work / "run")
            try:
                rekindle.stop(NAME)
            except (RekindleError, subprocess.TimeoutExpired) as error:
                if "there is no VM" not in str(error) and processes_with(str(work)):
                    raise RunError(f"{work}: what a killed run left cannot be ended: {error}") from error
        subprocess.run(["umount", "-l", work / "ram"], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", leaves["netns"]], capture_output=True, check=False)
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(leaves["disk"], ignore_errors=True)

    def run(self, planned: Planned, settings: dict[str, Any], leaves: dict[str, Any]) -> Measured:
        """One run."""
        del planned
        try:
            with self._place(leaves) as (work, ram, disk):
                return self._in_place(settings, leaves["netns"], work, ram, disk)
        except RekindleError as error:
            raise RunError(str(error)) from error
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            raise RunError(f"{type(error).__name__}: {error}") from error

    @contextmanager
    def _place(self, leaves: dict[str, Any]) -> Iterator[tuple[Path, Path, Path]]:
        work, disk = Path(leaves["work"]), Path(leaves["disk"])
        try:
            with ExitStack() as stack:
                ram = work / "ram"
                ram.mkdir(parents=True)
                disk.mkdir(parents=True)
                subprocess.run(
                    ["mount", "-t", "tmpfs", "-o", "size=90%,mode=0700", "rekindle-lab", ram],
                    check=True,
                    capture_output=True,
                )
                stack.enter_context(netns.namespace(leaves["netns"]))
                yield work, ram, disk
        finally:
            self.clear(leaves)

    def _in_place(self, settings: dict[str, Any], space: str, work: Path, ram: Path, disk: Path) -> Measured:
        about = self.experiment.guest
        image = guests.build(self.root, about.image)
        guest = guests.Guest(NAME, image, about.memory_mib, 1, settings.get("touch"), space, ram, disk)
        rekindle = Rekindle(self.binary, work / "run")
        definition = guest.write(work, self.qemu)
        lines = definition.read_text()
        if settings.get("disk_server"):
            lines = lines.replace(guests.QEMUS_OWN, "server = true")
        definition.write_text("\n".join([about.definition, settings.get("definition", ""), lines]))
        rekindle.run(definition)
        guest.wait_ready()
        with ExitStack() as stack:
            if "protect_every" in settings:
                stack.enter_context(protected(rekindle, NAME, on_disk(disk / "store"), settings["protect_every"]))
            measured = Measured()
            self._load(rekindle, guest, work, measured)
            if "reboot" in settings:
                self._act(rekindle, guest, settings, measured)
        return measured

    def _client(self) -> tuple[str, ...]:
        return ("--connections", str(self.experiment.guest.connections))

    def _load(self, rekindle: Rekindle, guest: guests.Guest, work: Path, measured: Measured) -> None:
        """Warm-up, then throughput and response time under the client's load, with samples of host and guest."""
        about = self.experiment.guest
        targets = [(guest.service_url, guest.netns)]
        with rekindle.probes(targets, *self._client(), every=about.every, margin_s=0.0):
            time.sleep(about.warm_up_s)
        status = GuestStatus(guest) if guest.image.kind.startswith("debian") else None
        inside = status.take if status else None
        with (
            rekindle.probes(targets, *self._client(), every=about.every, margin_s=0.0) as probes,
            Sampler(about.sample_every_s, lambda: processes_with(str(work)), inside) as sampler,
        ):
            time.sleep(about.measure_s)
        report = probes[0].report
        measured.samples += [*sampler.samples, {"load": report}]
        measured.responses |= sampler.share() | (status.responses(sampler.samples) if status else {})
        measured.responses |= {
            "throughput_per_s": report["answered"] / (report["elapsed_us"] / 1e6),
            "failed_requests": float(failed_requests(report)),
        }
        if report["latency"]:
            measured.responses["response_time_ms"] = report["latency"]["p50_us"] / 1e3

    def _act(self, rekindle: Rekindle, guest: guests.Guest, settings: dict[str, Any], measured: Measured) -> None:
        """The reboot, with a client at it: downtime is its longest silence."""
        about = self.experiment.guest
        how = ["--how", settings["how"]] if "how" in settings else []
        patience = "300s" if settings["reboot"] == "vmm" and settings.get("how") != "cold" else "5s"
        options = (*self._client(), "--timeout", patience)
        with rekindle.probes([(guest.service_url, guest.netns)], *options, every=about.every) as probes:
            document = rekindle.call("reboot", settings["reboot"], NAME, *how, *settings.get("options", []))
            guest.wait_ready()
            time.sleep(about.settle_s)
        report = probes[0].report
        _, _, length_us = gap_around(report, None, None)
        measured.samples.append({"reboot": document, "client": report})
        measured.responses["downtime_s"] = length_us / 1e6
        measured.responses["failed_requests"] += failed_requests(report)
