"""A client that connects to libvirt every 10 ms, asks for the number of domains, and disconnects. Executed as a file.

It prints `ready` when it was answered for the first time. On SIGINT it prints all attempts as JSON, each as
`[begin, end, answered]`, with times in microseconds since 1970, and ends.
"""

import ctypes
import json
import signal
import sys
import time

EVERY_S = 0.01
LIBRARY = "libvirt.so.0"


class Client:
    """libvirt's C library, as every client of libvirt uses it."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.encode()
        self._library = ctypes.CDLL(LIBRARY)
        self._library.virConnectOpen.restype = ctypes.c_void_p
        for name in ("virConnectNumOfDomains", "virConnectClose"):
            getattr(self._library, name).argtypes = [ctypes.c_void_p]
        # Without a function of its own the library prints each error.
        self._ignore_error = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(lambda _data, _error: None)
        self._library.virSetErrorFunc(None, self._ignore_error)

    def is_answered(self) -> bool:
        """Connects, and returns whether the daemon has answered. Blocks while the daemon lets the client wait."""
        connection = self._library.virConnectOpen(self._uri)
        if not connection:
            return False
        domains = self._library.virConnectNumOfDomains(connection)
        self._library.virConnectClose(connection)
        return domains >= 0


def main(uri: str) -> None:
    """Polls until SIGINT."""
    client = Client(uri)
    stop: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: stop.append(number))
    attempts: list[tuple[int, int, bool]] = []
    is_ready = False
    while not stop:
        begin_us = time.time_ns() // 1000
        answered = client.is_answered()
        end_us = time.time_ns() // 1000
        attempts.append((begin_us, end_us, answered))
        if answered and not is_ready:
            is_ready = True
            print("ready", flush=True)
        time.sleep(max(0.0, EVERY_S - (end_us - begin_us) / 1e6))
    print(json.dumps(attempts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
