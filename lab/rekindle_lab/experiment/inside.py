"""Samples from inside a debian guest, over ssh: the paper's CPU, load, free memory and I/O of table 2."""

import subprocess
from typing import Any

from rekindle_lab.guests import Guest

ASK = "cat /proc/loadavg; head -1 /proc/stat; grep -E '^(MemFree|Buffers|Cached|Slab):' /proc/meminfo; cat /proc/vmstat"
DEADLINE_S = 60.0


class GuestStatus:
    """Asks one guest. A sample that fails raises: a run without its samples has failed."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def take(self) -> dict[str, Any]:
        """One sample: times in units of the guest's clock ticks, memory in KiB, pages in and out in KiB."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=30")
        command = ["ip", "netns", "exec", self.guest.netns, "ssh", "-i", str(self.guest.image.key)]
        command += [word for option in options for word in ("-o", option)]
        command += [f"root@{self.guest.address}", ASK]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{self.guest.name}: ssh: exit status {done.returncode}: {done.stderr.strip()[-500:]}")
        return parse(done.stdout)

    @staticmethod
    def responses(samples: list[dict[str, Any]]) -> dict[str, float]:
        """The responses of a window: load and free memory are averages, CPU and I/O go from its first to its last."""
        inside = [sample["guest"] for sample in samples]
        first, last = inside[0], inside[-1]
        ticks = last["ticks"] - first["ticks"]
        busy = ticks - (last["idle_ticks"] - first["idle_ticks"])
        return {
            "guest_cpu_pct": 100 * busy / ticks if ticks else 0.0,
            "guest_load": sum(one["load_15min"] for one in inside) / len(inside),
            "guest_free_kib": sum(one["free_kib"] for one in inside) / len(inside),
            "guest_io_blocks": float(last["paged_kib"] - first["paged_kib"]),
        }


def parse(text: str) -> dict[str, Any]:
    """From what `ASK` prints. Free memory is all that is available, with buffers and caches, as in the paper."""
    lines = text.splitlines()
    cpu = [int(word) for word in lines[1].split()[1:]]
    numbers = {key.rstrip(":"): int(value.split()[0]) for key, _, value in (line.partition(" ") for line in lines[2:])}
    return {
        "load_15min": float(lines[0].split()[2]),
        "ticks": sum(cpu[:8]),
        "idle_ticks": cpu[3] + cpu[4],
        "free_kib": numbers["MemFree"] + numbers["Buffers"] + numbers["Cached"],
        "slab_kib": numbers["Slab"],
        "paged_kib": numbers["pgpgin"] + numbers["pgpgout"],
    }
