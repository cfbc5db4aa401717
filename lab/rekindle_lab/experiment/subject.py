"""Builds the guest of a run: the experiment's guest specification (`GuestSpec`) with the settings of the run's level.

A level of a factor is a set of settings, such as `how = "phase"`; `settings.py` lists them. The VM's definition, disk,
memory and network are new in each run, so that no run depends on the one before.
Phases are the points of its boot at which the guest saves a snapshot, to resume from it in a later reboot.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab import guests
from rekindle_lab.experiment.definition import Guest as GuestSpec
from rekindle_lab.guests import Image
from rekindle_lab.leak import leak_image
from rekindle_lab.os_guest import OsGuest

NAME = "subject"
"""Name of the VM in every run: each run has a run directory of its own, so that names do not collide."""
SERVER_LINE = "server = true"
"""Line of a VM definition that gives a disk to a disk server of Rekindle."""


@dataclass(frozen=True)
class Subject(OsGuest):
    """A guest with the settings of an experiment and of a run's level."""

    served: bool = True
    """Whether Rekindle's disk servers have the guest's disks; otherwise QEMU has them."""
    cache: str = ""
    """Cache mode of the guest's disks on the host."""
    definition_lines: str = ""
    """Lines that are added to the VM's definition, before all tables."""

    @property
    def command_line(self) -> str:
        """Kernel command line of the guest."""
        line = super().command_line
        return f"{line} rekindle.touch={self.touch}" if self.touch else line

    def disk_lines(self) -> list[str]:
        """Returns the disks of the VM definition."""
        lines = []
        for line in super().disk_lines():
            lines.append(line if self.served or line != SERVER_LINE else guests.QEMUS_OWN)
            if line == SERVER_LINE and self.cache:
                lines.append(f"cache = {json.dumps(self.cache)}")
        return lines

    def definition(self, qemu: str) -> str:
        """Returns the VM definition in TOML, for the QEMU binary `qemu`."""
        return f"{self.definition_lines}\n{super().definition(qemu)}"


def image(root: Path, guest_spec: GuestSpec) -> Image:
    """Returns the guest's image, built if necessary; for leaks, micro's image with the leak module."""
    if guest_spec.image == "micro" and guest_spec.leak_mib:
        return Image("micro", leak_image(root))
    return guests.build(root, guest_spec.image)


def subject(
    guest_spec: GuestSpec, settings: dict[str, Any], image: Image, *, netns: str, ram: Path, disk: Path
) -> Subject:
    """Returns the guest with these settings, in the network namespace `netns`, with RAM and disk in these folders."""
    return Subject(
        name=NAME,
        image=image,
        memory_mib=guest_spec.memory_mib,
        index=1,
        touch=settings.get("touch"),
        netns=netns,
        ram_dir=ram,
        disk_dir=disk,
        kind=guest_spec.image,
        phases=settings.get("how") == "phase",
        served=settings.get("disk_server", guest_spec.disk_server),
        cache=guest_spec.disk_cache,
        definition_lines="\n".join([guest_spec.definition, settings.get("definition", "")]),
    )
