"""Topic `warm-cache`: how much of its cache a guest has after a reboot, compared with cold reboots and peers.

Follows section 5 of the paper on CacheMind: figures 5 to 13, table 1.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
