"""The case of figure 13: one client requests 4,000 files, one at a time, while the guest is rebooted."""

import time

from rekindle_lab.web import Client, rates

from .cache_guests import CacheEnvironment
from .file_access import Measurement
from .plan import Plan
from .rows import Row
from .watch import Watch
from .ways import COLD, WARM, turns

MEMORY_MIB = 1024
FILE_BYTES = 65536
STAND_IN_FILE = f"/bytes/{FILE_BYTES}"
"""The one file of micro, which replaces the guest in a trial."""


def http(env: CacheEnvironment, plan: Plan) -> None:
    """Measures requests and bytes of each second before and after each reboot."""
    limit = plan.limits[0]
    env.limit_rates(None)
    with env.ours(env.cached("http", MEMORY_MIB, 6)) as guest:
        # Disabled because PostgreSQL would start while the web server already serves files.
        guest.ssh("systemctl disable --now postgresql@15-main")
        paths = [STAND_IN_FILE if guest.stands_in else f"/many/{index:04}" for index in range(plan.web_files)]
        with env.limited(limit), Client(guest.netns, guest.address, paths) as client:
            client.wait(len(paths))
            for round_number in range(plan.http_rounds):
                for how in turns(round_number, (WARM, COLD)):
                    # All files are requested once more, so that all are cached, also after a cold reboot.
                    client.wait(len(paths))
                    began = time.monotonic()
                    time.sleep(plan.http_s)
                    reboot_began = time.monotonic()
                    with Watch(guest.name, env.ram_dir) as watch:
                        steps = env.reboot(guest, how).get("steps", [])
                        services_answered = time.monotonic()
                        time.sleep(plan.http_s)
                    for second, requests, moved, took_us in rates(
                        client.answers, began, reboot_began, services_answered, time.monotonic()
                    ):
                        columns = {"bytes": moved, "us": took_us, "requests": requests, "second": second}
                        columns |= {"memory_mib": guest.memory_mib, "block": FILE_BYTES}
                        env.rows.append(
                            Row(case="http", what="http", how=how, limit=limit, round=round_number, **columns)
                        )
                    Measurement(env, guest, "http", limit).append_memory(watch, how, round_number, steps)
                env.log(f"http: {round_number + 1} of {plan.http_rounds}")
