"""An invented record of one reboot, in the formats of the real commands (`record`).

A record has the JSON of the reboot (its steps, and when the guest stopped and resumed) and the report of a probe, the
client that requested the guest's service meanwhile (answers per interval, and gaps without an answer).
"""

START_US = 1_800_000_000_000_000
"""When the probe starts, in microseconds since 1970; any fixed time would do."""


def steps(spans):
    """Returns the steps of a reboot. `spans`: (phase, step, start, length) of each, in ms from START_US."""
    return [
        {"phase": phase, "step": step, "start_host_us": START_US + int(start_ms * 1000), "us": int(length_ms * 1000)}
        for phase, step, start_ms, length_ms in spans
    ]


def record(how, *, stop_ms, resume_ms, gap_ms, failed=0, seconds=10, rate=800):
    """Returns a record whose probe got `rate` answers per second for `seconds`, except in a gap from `stop_ms` on.

    The guest is stopped from `stop_ms` to `resume_ms`; times count from START_US. `failed`: number of failed requests.
    """
    width_ms = 100  # of an interval in which the probe counts answers
    intervals = []
    for start_ms in range(0, seconds * 1000, width_ms):
        # How much of this interval is in the gap.
        silent_ms = max(0, min(start_ms + width_ms, stop_ms + gap_ms) - max(start_ms, stop_ms))
        answered = round(rate * (width_ms - silent_ms) / 1000)
        intervals.append({"start_ms": start_ms, "answered": answered, "failed": 0, "bytes": answered * 100})
    half_stop_ms = (resume_ms - stop_ms) / 2
    spans = [
        ("prepare", "start", stop_ms - 200, 200),
        ("suspend", "save", stop_ms, half_stop_ms),
        ("renew", "load", stop_ms + half_stop_ms, half_stop_ms),
        ("resume", "cont", resume_ms, 1),
        ("settle", "end-old", resume_ms + 1, 20),
    ]
    return {
        "how": how,
        "reboot": {
            "how": how,
            "vms": [
                {
                    "name": "web",
                    "outcome": "done",
                    "from": {"version": {"major": 7, "minor": 2, "micro": 22}},
                    "to": {"version": {"major": 10, "minor": 0, "micro": 2}},
                    "stopped_us": int((resume_ms - stop_ms) * 1000),
                    "stop_host_us": START_US + int(stop_ms * 1000),
                    "resume_host_us": START_US + int(resume_ms * 1000),
                    "steps": steps(spans),
                }
            ],
        },
        "probe": {
            "started_unix_ns": START_US * 1000,
            "elapsed_us": seconds * 1_000_000,
            "interval_ms": width_ms,
            "intervals": intervals,
            "answered": sum(interval["answered"] for interval in intervals),
            "failed": {"timeouts": 0, "resets": failed, "refused": 0, "unreachable": 0, "wrong_content": 0},
            "connections_lost": 0,
            "longest_gap_us": int(gap_ms * 1000),
            "gaps": [{"start_unix_ns": (START_US + int(stop_ms * 1000)) * 1000, "length_us": int(gap_ms * 1000)}],
        },
    }
