"""Topic `warm-cache`: how much of its cache a guest has after a reboot, compared with cold reboots and peers.

Follows section 5 of the paper on CacheMind: figures 5 to 13, table 1.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
