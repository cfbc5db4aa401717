"""Draws the demo's measurements: throughput over time for each way to reboot, and a table.

    python -m rekindle_bench.demo.vmm --out demo.png warm.json saved.json cold.json

Each file is `{"how": NAME, "reboot": JSON of the reboot, "probe": JSON of the probe's report}`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rekindle_lab import style, throughput
from rekindle_lab.records import Record, load
from rekindle_lab.tables import table


def summary(records: Sequence[Record]) -> str:
    """Formats a table of the reboots for the terminal."""

    def stopped(record: Record) -> str:
        return "- (shut down, booted)" if record.stopped_ms is None else style.duration(record.stopped_ms)

    return table(
        [
            {
                "how": record.how,
                "QEMU": record.versions,
                "guest-stopped time": stopped(record),
                "service gap": style.duration(record.gap_ms),
                "requests lost": record.failed_requests,
            }
            for record in records
        ]
    )


def main(
    files: Annotated[list[Path], typer.Argument(help="Records, in the order of the panels.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")],
) -> None:
    """Draw throughput over time around each reboot, and print a table."""
    try:
        records = [load(path) for path in files]
    except (OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    throughput.draw(records, out, title="Throughput while the VMM is replaced")
    print(summary(records))


if __name__ == "__main__":
    typer.run(main)
