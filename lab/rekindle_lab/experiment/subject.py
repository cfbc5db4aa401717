"""The guest of a run. All of it is made anew for each run: definition, disk, memory, network."""

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
    """Whether Rekindle's servers have its disks; otherwise QEMU has them."""
    cache: str = ""
    """How its disks are cached on the host."""
    more: str = ""
    """Further lines of its definition, before all tables."""

    @property
    def command_line(self) -> str:
        """The command line of its kernel."""
        line = super().command_line
        return f"{line} rekindle.touch={self.touch}" if self.touch else line

    def disk_lines(self) -> list[str]:
        """Returns the disks of its VM definition."""
        lines = []
        for line in super().disk_lines():
            lines.append(line if self.served or line != SERVED else guests.QEMUS_OWN)
            if line == SERVED and self.cache:
                lines.append(f"cache = {json.dumps(self.cache)}")
        return lines

    def definition(self, qemu: str) -> str:
        """Returns its VM definition in TOML, for this QEMU binary."""
        return f"{self.more}\n{super().definition(qemu)}"


def image(root: Path, about: About) -> Image:
    """Returns the image, built if need be; for leaks, micro's image with the leak module."""
    if about.image == "micro" and about.leak_mib:
        return Image("micro", leak_image(root))
    return guests.build(root, about.image)


def subject(about: About, settings: dict[str, Any], image: Image, space: str, ram: Path, disk: Path) -> Subject:
    """Returns the guest for these settings, in the network namespace `space`, with RAM and disk in these folders."""
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
