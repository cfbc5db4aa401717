"""Topic `warm-cache`: how much of its cache a guest has after a reboot, compared with cold reboots and peers.

Follows section 5 of the paper on CacheMind: figures 5 to 13, table 1. A guest's page cache is lost in a *cold* reboot.
In a *warm-cache* reboot, Rekindle's disk server keeps the guest's previous RAM (the *retained cache*; `attic` in names)
and serves blocks from it. Its *block map* records which page of that RAM has which block of the disk.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
