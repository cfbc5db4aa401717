"""Topic `os`: rebooting a guest's system in each way, by stages of its boot, with what a leak leaves behind; and peers.

Follows sections 3 and 5 of Towards Fast OS Rejuvenation.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
