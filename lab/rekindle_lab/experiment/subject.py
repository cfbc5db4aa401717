"""Builds the guest of a run with its level's settings; definition, disk, memory and network are new in each run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle_lab import guests
from rekindle_lab.experiment.definition import Guest as About
from rekindle_lab.guests import Image
from rekindle_lab.leak import leak_image
from rekindle_lab.os_guest import OsGuest

NAME = "subject"
SERVER_LINE = "server = true"


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


def image(root: Path, about: About) -> Image:
    """Returns the guest's image, built if necessary; for leaks, micro's image with the leak module."""
    if about.image == "micro" and about.leak_mib:
        return Image("micro", leak_image(root))
    return guests.build(root, about.image)


def subject(about: About, settings: dict[str, Any], image: Image, netns: str, ram: Path, disk: Path) -> Subject:
    """Returns the guest with these settings, in the network namespace `netns`, with RAM and disk in these folders."""
    return Subject(
        name=NAME,
        image=image,
        memory_mib=about.memory_mib,
        index=1,
        touch=settings.get("touch"),
        netns=netns,
        ram_dir=ram,
        disk_dir=disk,
        kind=about.image,
        phases=settings.get("how") == "phase",
        served=settings.get("disk_server", about.disk_server),
        cache=about.disk_cache,
        definition_lines="\n".join([about.definition, settings.get("definition", "")]),
    )
