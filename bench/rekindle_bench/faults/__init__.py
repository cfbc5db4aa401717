"""Topic `faults`: whether a guest reads wrong data after a warm-cache reboot that followed faults in its kernel or RAM.

Follows section 5.7 of the paper on CacheMind (figures 14 and 15); docs/fault-experiment.md. After a warm-cache reboot
the disk server serves blocks from the RAM of the previous boot (the *retained cache*; `attic` in names). It checks the
digest of each block first; in the control (*unchecked*) it does not.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
