"""Topic `faults`: whether a guest reads wrong data after a warm-cache reboot that followed faults in its kernel or RAM.

Follows section 5.7 of the paper on CacheMind (figures 14 and 15); docs/fault-experiment.md.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
