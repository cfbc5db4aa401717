"""The `rekindle` command as the lab uses it: every call with `--json`, in a run directory of the experiment's own.

`Rekindle` is one binary with one run directory, and has a method for each command. `Rekindle.probes` runs clients
(`rekindle probe`) during a measured event; `gap_around` and `failed_requests` evaluate their reports, whose format
`records.py` shows.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

VMM_WAYS = ("warm", "saved", "cold")
"""Values of `--how` of `rekindle replace-qemu`."""
OS_WAYS = ("cold", "kexec", "warm-cache", "phase")
"""Values of `--how` of `rekindle reboot`."""
COMMAND_DEADLINE_S = 900.0
"""Deadline for a command: long, since without KVM a boot can take minutes."""
MAX_ERROR_CHARS = 2000
"""How much of the end of a command's output an error includes."""
MARGIN_S = 0.4
"""Seconds for which a probe runs undisturbed before and after the measured event, so that its gap is distinct."""


class RekindleError(Exception):
    """A command failed. The text has the command, its exit status and its output."""


def last_json(text: str) -> dict[str, Any]:
    """Parses the JSON object on the last line that is not empty."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("no output")
    value = json.loads(lines[-1])
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {lines[-1][:200]}")
    return value


@dataclass
class Probe:
    """A client that runs during a reboot. `report` is set once the client has been stopped."""

    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rekindle:
    """One binary with one run directory."""

    binary: Path
    run_dir: Path
    config: Path | None = None
    """The configuration of the host (`host.toml`), instead of this machine's own."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the binary's commands."""
        config = {} if self.config is None else {"REKINDLE_HOST_CONFIG": str(self.config)}
        return {**os.environ, "REKINDLE_RUN_DIR": str(self.run_dir), **config}

    def call(self, *arguments: str, ok: Sequence[int] = (0,)) -> dict[str, Any]:
        """Runs a command and returns its JSON. `ok`: accepted exit statuses."""
        command = [str(self.binary), *arguments, "--json"]
        completed = subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        output = (completed.stderr.strip() or completed.stdout.strip())[-MAX_ERROR_CHARS:]
        if completed.returncode not in ok:
            raise RekindleError(f"rekindle {' '.join(arguments)}: exit status {completed.returncode}: {output}")
        try:
            return last_json(completed.stdout)
        except ValueError as error:
            raise RekindleError(f"rekindle {' '.join(arguments)}: no JSON ({error}): {output}") from error

    def version(self) -> str:
        """Returns the output of `--version`."""
        completed = subprocess.run([str(self.binary), "--version"], capture_output=True, text=True, check=True)
        return completed.stdout.strip()

    def run(self, definition: Path) -> None:
        """Starts a VM."""
        self.call("run", str(definition))

    def stop(self, name: str) -> None:
        """Kills a VM, even if an operation on it was interrupted."""
        try:
            self.call("stop", name, "--now")
        except RekindleError:
            self.call("recover", name, ok=range(256))
            self.call("stop", name, "--now")

    def show(self, name: str) -> dict[str, Any]:
        """Returns the output of `rekindle show` for a VM."""
        return self.call("show", name)

    def reboot(self, names: Sequence[str], how: str, *options: str) -> dict[str, Any]:
        """Replaces the VMMs of several VMs in parallel."""
        return self.call("replace-qemu", *names, "--how", how, *options)

    @contextmanager
    def probes(
        self, targets: Sequence[tuple[str, str]], *options: str, every: str = "1ms", margin_s: float = MARGIN_S
    ) -> Iterator[list[Probe]]:
        """Probes each `(URL, network namespace)` while the body runs; the reports are in the results afterwards.

        The probes run undisturbed for `margin_s` seconds before the body and after it.
        """
        probes = [Probe() for _ in targets]
        running: list[subprocess.Popen[str]] = []
        try:
            for url, netns in targets:
                running.append(self._start_probe(url, netns, every, options))
            time.sleep(margin_s)
            yield probes
            time.sleep(margin_s)
            for process in running:
                process.send_signal(signal.SIGINT)
            for (url, _), probe, process in zip(targets, probes, running, strict=True):
                out, err = process.communicate(timeout=30)
                try:
                    probe.report = last_json(out)
                except ValueError as error:
                    output = err.strip()[-MAX_ERROR_CHARS:]
                    raise RekindleError(f"rekindle probe {url}: no report ({error}): {output}") from error
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.communicate()

    def _start_probe(self, url: str, netns: str, every: str, options: Sequence[str]) -> subprocess.Popen[str]:
        command = [str(self.binary), "probe", url, "--every", every, "--netns", netns, *options, "--json"]
        return subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


class ServiceGap(NamedTuple):
    """A time without an answer, in microseconds; start and end by the host's clock, 0 if they are unknown."""

    start_host_us: int
    end_host_us: int
    length_us: int


def gap_around(report: dict[str, Any], stop_host_us: int | None, resume_host_us: int | None) -> ServiceGap:
    """Returns the gap in service of a guest that was stopped from one host time to the other (microseconds since 1970).

    Returns the longest gap that overlaps the stop. If no listed gap does, or the times are unknown, returns the longest
    gap of all.
    """
    gaps = []
    for gap in report["gaps"]:
        start_us = gap["start_unix_ns"] // 1000
        gaps.append(ServiceGap(start_us, start_us + gap["length_us"], gap["length_us"]))
    if stop_host_us is not None and resume_host_us is not None:
        overlapping = [gap for gap in gaps if gap.start_host_us < resume_host_us and gap.end_host_us > stop_host_us]
        gaps = overlapping or gaps
    if not gaps:
        return ServiceGap(0, 0, int(report["longest_gap_us"]))
    return max(gaps, key=lambda gap: gap.length_us)


def failed_requests(report: dict[str, Any]) -> int:
    """Returns the number of failed requests of a probe's report."""
    return sum(report["failed"].values())
