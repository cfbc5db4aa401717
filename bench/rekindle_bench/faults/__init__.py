"""Topic `faults`: whether a guest reads wrong data after a warm-cache reboot that followed faults in its kernel or RAM.

Follows section 5.7 of the paper on CacheMind (figures 14 and 15); docs/fault-experiment.md.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
