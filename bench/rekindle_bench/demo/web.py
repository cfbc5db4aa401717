"""Measures a web server through a cold and a warm-cache reboot of its guest, and draws both side by side.

    python -m rekindle_bench.demo.web --rekindle BINARY --qemu QEMU --out web.png

The guest is `debian`. Rekindle's disk server serves its disk, with the rate limit of the VM's definition (`bps`), so
the result does not depend on the machine's disk. Reads from the retained cache are not limited.
"""

import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import numpy as np
import typer
from matplotlib.axes import Axes

from rekindle_bench.environment import Setup
from rekindle_bench.rows import RowFile
from rekindle_bench.warm_cache.cache_guests import CacheEnvironment, CacheGuest, environment
from rekindle_lab import style
from rekindle_lab.machine import interrupt_on_signals
from rekindle_lab.rekindle import RekindleError
from rekindle_lab.tables import table
from rekindle_lab.web import Answer, Client

COLD, WARM = "cold", "warm-cache"
FILES = 200
PATHS = [f"/files/{n:03}.bin" for n in range(FILES)]
"""The files of the web server: 50 MB in total."""
BYTES_PER_S = 5_000_000
"""Rate limit of the disk. The rate is low because an emulated processor is slow, too."""
MEMORY_MIB = 1024
BEFORE_S = 5.0
"""Duration of the measurement before a reboot, in s."""
AFTER = 3 * FILES
"""Number of files to be served after a reboot."""
STEP_S = 0.5
"""Time step of the throughput in the picture, in s."""


@dataclass
class Row:
    """One file that was served, in the raw data."""

    how: str
    at_ms: int
    """Time of the complete answer since the command to reboot."""
    bytes: int
    us: int
    """Duration of the request."""


@dataclass(frozen=True)
class Reboot:
    """One reboot as seen by the web server's client. Times in s since the command."""

    how: str
    answers: list[Answer]
    well: float
    """When all services of the guest answered again."""
    end: float
    """End of the measurement."""
    retained_bytes: int
    """Bytes that the guest has read from its retained cache."""

    @property
    def gap_s(self) -> float:
        """The longest time without an answer that ended after the command."""
        return max(later.at - earlier.at for earlier, later in itertools.pairwise(self.answers) if later.at > 0)

    def after(self) -> list[Answer]:
        """Returns the answers from when all services of the guest answered again."""
        return [answer for answer in self.answers if answer.at >= self.well]

    def served(self) -> float:
        """Returns when as many files were served as there are, counted from when all services answered again."""
        return self.after()[FILES - 1].at  # `AFTER` is more than `FILES`

    def rate_before(self) -> float:
        """Returns MB/s before the reboot."""
        return sum(answer.bytes for answer in self.answers if -BEFORE_S <= answer.at < 0) / BEFORE_S / 1e6

    def rate_after(self) -> float:
        """Returns MB/s from when all services answered again until `served`."""
        return sum(answer.bytes for answer in self.after()[:FILES]) / (self.served() - self.well) / 1e6


def through(env: CacheEnvironment, guest: CacheGuest, client: Client, how: str) -> Reboot:
    """Reboots the guest while a client requests files from its web server."""
    time.sleep(BEFORE_S)
    started = time.monotonic()
    env.reboot(guest, how)
    well = time.monotonic() - started
    client.wait(AFTER)
    end = time.monotonic() - started
    answers = [Answer(answer.at - started, answer.took_s, answer.bytes) for answer in client.answers]
    shown = [answer for answer in answers if -BEFORE_S <= answer.at <= end]
    return Reboot(how=how, answers=shown, well=well, end=end, retained_bytes=env.from_retained_cache(guest))


def measure(env: CacheEnvironment) -> list[Reboot]:
    """Measures one guest through both reboots."""
    image = env.image("debian")
    guest = CacheGuest(
        "web",
        image=image,
        memory_mib=MEMORY_MIB,
        index=1,
        touch=None,
        netns=env.netns,
        ram_dir=env.ram_dir,
        disk_dir=env.disk_dir,
        bytes_per_s=BYTES_PER_S,
    )
    reboots = []
    with env.ours(guest):
        # Disabled because PostgreSQL would start while the web server already serves files.
        guest.ssh("systemctl disable --now postgresql@15-main")
        with Client(guest.netns, guest.address, PATHS) as client:
            for how in (COLD, WARM):
                client.wait(FILES)  # so that the guest has cached all of them
                reboots.append(through(env, guest, client, how))
                for answer in reboots[-1].answers:
                    env.rows.append(
                        Row(how=how, at_ms=round(answer.at * 1e3), bytes=answer.bytes, us=round(answer.took_s * 1e6))
                    )
                env.log(f"{how}: {FILES} files after {reboots[-1].served():.1f} s")
    return reboots


def _panel(axes: Axes, reboot: Reboot, begin: float, end: float) -> None:
    edges = np.arange(begin, end + STEP_S, STEP_S)
    sizes = [answer.bytes for answer in reboot.answers]
    moved, _ = np.histogram([answer.at for answer in reboot.answers], bins=edges, weights=sizes)
    colour = style.COLOURS["cold" if reboot.how == COLD else "warm"]
    axes.stairs(moved / STEP_S / 1e6, edges, color=colour, fill=True, alpha=0.25, linewidth=0)
    axes.stairs(moved / STEP_S / 1e6, edges, color=colour, linewidth=1.4, baseline=None)
    axes.axvspan(0, reboot.well, color="#000000", alpha=0.08, linewidth=0)
    axes.axvline(reboot.served(), color=colour, linestyle=":")
    if reboot.end < end:
        axes.axvspan(reboot.end, end, facecolor="none", edgecolor="#DDDDDD", hatch="///", linewidth=0)
    axes.set_xlim(begin, end)
    axes.set_title(f"{reboot.how}: all {FILES} files served after {style.duration(reboot.served() * 1e3)}")
    axes.set_xlabel("time since the command to reboot (s)")


def draw(reboots: Sequence[Reboot], path: Path) -> None:
    """Draws a panel for each reboot, side by side, with the same axes."""
    style.apply()
    figure, all_axes = plt.subplots(
        1, len(reboots), figsize=(5.2 * len(reboots), 3.8), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, reboot in zip(all_axes[0], reboots, strict=True):
        _panel(axes, reboot, -BEFORE_S, max(other.end for other in reboots))
    all_axes[0][0].set_ylabel("MB/s")
    all_axes[0][0].set_ylim(0)
    limit = f"{BYTES_PER_S / 1e6:g} MB/s"
    style.title(figure, f"A web server while its guest is rebooted; its disk is limited to {limit}")
    figure.text(
        0.01, -0.04, "grey: until all services answer; dotted: as many files served as there are; hatched: not watched"
    )
    style.save(figure, path)


def summary(reboots: Sequence[Reboot]) -> str:
    """Formats a table of the reboots for the terminal."""
    return table(
        [
            {
                "how": reboot.how,
                "services answer after": style.duration(reboot.well * 1e3),
                f"{FILES} files served after": style.duration(reboot.served() * 1e3),
                "MB/s before": round(reboot.rate_before(), 1),
                "MB/s of these files": round(reboot.rate_after(), 1),
                "MB from retained cache": round(reboot.retained_bytes / 1e6, 1),
            }
            for reboot in reboots
        ]
    )


def as_json(reboots: Sequence[Reboot]) -> list[dict[str, Any]]:
    """Returns the input of `demo.plan`."""
    return [
        {
            "how": reboot.how,
            "gap_s": round(reboot.gap_s, 3),
            "well_s": round(reboot.well, 3),
            "served_s": round(reboot.served(), 3),
            "mb_per_s_before": round(reboot.rate_before(), 3),
            "mb_per_s_after": round(reboot.rate_after(), 3),
        }
        for reboot in reboots
    ]


def main(
    rekindle: Annotated[Path, typer.Option(help="The binary.")],
    qemu: Annotated[str, typer.Option(help="The QEMU.")],
    out: Annotated[Path, typer.Option(help="The PNG to write; raw data and disks are written next to it.")],
) -> None:
    """Watch a web server through both reboots, draw its throughput, and print a table."""
    interrupt_on_signals("demo")
    root = Path(__file__).resolve().parents[3]
    out = out.resolve()  # absolute, since definitions in another folder name the disks next to it
    rows = RowFile(out.with_suffix(".csv"), Row)
    try:
        with environment(
            Setup(root=root, binary=rekindle.resolve(), qemu=qemu, rows=rows, disk=out.parent), slow=False
        ) as env:
            reboots = measure(env)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (OSError, RekindleError, RuntimeError) as error:
        print(f"demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    finally:
        rows.close()
    draw(reboots, out)
    out.with_suffix(".json").write_text(json.dumps(as_json(reboots)) + "\n")
    print(f"The guest's disk is limited to {BYTES_PER_S / 1e6:g} MB/s by its server (`bps` in the definition).")
    print(summary(reboots))


if __name__ == "__main__":
    typer.run(main)
