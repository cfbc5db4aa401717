"""The guest of a run. Definition, disk, memory and network are made anew for each run."""

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
SERVED = "server = true"


@dataclass(frozen=True)
class Subject(OsGuest):
    """A guest with the settings of an experiment and of a run's level."""

    served: bool = True
    """Whether Rekindle's disk servers have the guest's disks; otherwise QEMU has them."""
    cache: str = ""
    """Cache mode of the guest's disks on the host."""
    more: str = ""
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
            lines.append(line if self.served or line != SERVED else guests.QEMUS_OWN)
            if line == SERVED and self.cache:
                lines.append(f"cache = {json.dumps(self.cache)}")
        return lines

    def definition(self, qemu: str) -> str:
        """Returns the VM definition in TOML, for the QEMU binary `qemu`."""
        return f"{self.more}\n{super().definition(qemu)}"


def image(root: Path, about: About) -> Image:
    """Returns the guest's image, built if necessary; for leaks, micro's image with the leak module."""
    if about.image == "micro" and about.leak_mib:
        return Image("micro", leak_image(root))
    return guests.build(root, about.image)


def subject(about: About, settings: dict[str, Any], image: Image, space: str, ram: Path, disk: Path) -> Subject:
    """Returns the guest with these settings, in the network namespace `space`, with RAM and disk in these folders."""
    return Subject(
        NAME,
        image,
        about.memory_mib,
        1,
        settings.get("touch"),
        space,
        ram,
        disk,
        kind=about.image,
        phases=settings.get("how") == "phase",
        served=settings.get("disk_server", about.disk_server),
        cache=about.disk_cache,
        more="\n".join([about.definition, settings.get("definition", "")]),
    )
