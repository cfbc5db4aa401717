"""The cases of the warm-cache benchmark by name; the other modules have them. Each takes the ways by turns."""

from collections.abc import Callable

from .block_map import map_cost
from .cache_guests import CacheEnvironment
from .file_access import files, folios, peers
from .helper import helper_back
from .native import native, retained
from .plan import Plan
from .queries import tpch
from .sandboxes import sandboxes
from .web_server import http

CASES: dict[str, Callable[[CacheEnvironment, Plan], None]] = {
    "native": native,
    "attic": retained,
    "read": files(lambda access: access.what == "read" and access.block >= 4096),
    "small": files(lambda access: access.what == "read" and access.block < 4096),
    "write": files(lambda access: access.what == "write"),
    "mmap": files(lambda access: access.what.startswith("mmap")),
    "cloud": files(lambda access: access.what == "read" and access.block == 4096, limit_index=1),
    "folios": folios,
    "map": map_cost,
    "http": http,
    "tpch": tpch,
    "peers": peers,
    "helper": helper_back,
    "sandboxes": sandboxes,
}
