"""Reads the record of one reboot as a client saw it (`load`), and computes its figures (`Record`).

A record is one JSON document, of which these keys are read; times are by the host's clock, since 1970:

    {"how": "warm",                                         the way to reboot
     "reboot": {"vms": [{"stopped_us", "stop_host_us", "resume_host_us",
                         "from", "to": {"version": {"major", "minor"}},          QEMU before and after
                         "steps": [{"phase", "step", "start_host_us", "us"}]}]},
     "probe": {"started_unix_ns", "interval_ms", "intervals": [{"answered"}],    good answers in each interval
               "gaps": [{"start_unix_ns", "length_us"}], "longest_gap_us",
               "failed": {kind of failure: number}}}                             the client's report
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rekindle_lab.rekindle import ServiceGap, failed_requests, gap_around

PROBE_KEYS = ("started_unix_ns", "interval_ms", "intervals", "gaps", "longest_gap_us", "failed")
"""Keys that the client's report must have."""


class Phase(NamedTuple):
    """A phase of a reboot; start and end by the host's clock in microseconds."""

    name: str
    begin_host_us: int
    end_host_us: int


class Throughput(NamedTuple):
    """Good answers per second: the n + 1 edges of n intervals, in s from the zero of plots, and the n rates."""

    edges_s: np.ndarray
    rates_per_s: np.ndarray


@dataclass(frozen=True)
class Record:
    """A reboot of one VM, with its client. Times in ms or s according to the names."""

    how: str
    """The way to reboot, such as `warm`."""
    vm: dict[str, Any]
    """The VM's part of the JSON of the reboot."""
    probe: dict[str, Any]
    """The client's report."""

    @property
    def stopped_ms(self) -> float | None:
        """Guest-stopped time; `None` for a cold reboot, whose guest is not stopped but shut down and booted."""
        if self.how == "cold":
            return None
        stopped_us = self.vm.get("stopped_us")
        # The command does not always report the duration; then it is computed from stop and resume.
        if stopped_us is None and self.stop_host_us is not None and self.resume_host_us is not None:
            stopped_us = self.resume_host_us - self.stop_host_us
        return None if stopped_us is None else stopped_us / 1e3

    @property
    def versions(self) -> str:
        """Versions of the QEMUs before and after the reboot, as `7.2 -> 10.0`; `?` for an unknown version."""

        def short(side: str) -> str:
            version = self.vm.get(side, {}).get("version")
            return f"{version['major']}.{version['minor']}" if version else "?"

        return f"{short('from')} -> {short('to')}"

    @property
    def stop_host_us(self) -> int | None:
        """When the guest stopped, by the host's clock."""
        return self.vm.get("stop_host_us")

    @property
    def resume_host_us(self) -> int | None:
        """When the guest (or, after a cold reboot, the next guest) began to run."""
        return self.vm.get("resume_host_us")

    @property
    def gap(self) -> ServiceGap:
        """The client's gap around the reboot."""
        return gap_around(self.probe, self.stop_host_us, self.resume_host_us)

    @property
    def gap_ms(self) -> float:
        """Length of the client's gap in ms."""
        return self.gap.length_us / 1e3

    @property
    def failed_requests(self) -> int:
        """Number of the client's requests that failed."""
        return failed_requests(self.probe)

    @property
    def phases(self) -> list[Phase]:
        """The phases in their order."""
        phases: dict[str, Phase] = {}
        for step in self.vm.get("steps", []):
            name, begin_us, end_us = step["phase"], step["start_host_us"], step["start_host_us"] + step["us"]
            so_far = phases.get(name, Phase(name, begin_us, end_us))
            phases[name] = Phase(name, min(so_far.begin_host_us, begin_us), max(so_far.end_host_us, end_us))
        return list(phases.values())

    @property
    def zero_host_us(self) -> int:
        """The zero of plots: when the guest was stopped or, in a cold reboot, requested to shut down."""
        suspend_us = next((phase.begin_host_us for phase in self.phases if phase.name == "suspend"), None)
        # In a cold reboot the guest stops at the end of its shutdown, which begins the phase `suspend`.
        preferred_us = (suspend_us, self.stop_host_us) if self.how == "cold" else (self.stop_host_us, suspend_us)
        client_start_us = self.probe["started_unix_ns"] // 1000
        return next((host_us for host_us in preferred_us if host_us is not None), client_start_us)

    def seconds_from_zero(self, host_us: float) -> float:
        """Returns a time of the host's clock as a time of plots."""
        return (host_us - self.zero_host_us) / 1e6

    def throughput(self, merge: int = 1) -> Throughput:
        """Returns good answers per second in each interval.

        `merge`: number of the probe's intervals that are merged into one.
        """
        answered = np.array([interval["answered"] for interval in self.probe["intervals"]], dtype=float)
        answered = answered[:-1]  # the last interval may be shorter
        merged_count = len(answered) // merge
        merged = answered[: merged_count * merge].reshape(merged_count, merge).sum(axis=1)
        width_s = self.probe["interval_ms"] * merge / 1e3
        begin_s = self.seconds_from_zero(self.probe["started_unix_ns"] / 1e3)
        return Throughput(begin_s + width_s * np.arange(merged_count + 1), merged / width_s)


def parse(document: dict[str, Any]) -> Record:
    """Parses the JSON of a record. Raises `ValueError` that names what is missing."""
    try:
        record = Record(document["how"], vm=document["reboot"]["vms"][0], probe=document["probe"])
        for key in PROBE_KEYS:
            _ = record.probe[key]  # raises `KeyError` if it is missing
        return record
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a record of a reboot with its probe: {error!r} is missing or of another kind") from error


def load(path: Path) -> Record:
    """Reads a record from a file."""
    try:
        return parse(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
