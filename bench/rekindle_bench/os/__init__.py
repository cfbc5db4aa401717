"""Topic `os`: reboots of a guest's system in each way, by stages of its boot, and the rest of a leak; with peers.

Follows sections 3 and 5 of the paper "Towards Fast OS Rejuvenation".
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
