"""Topic `host`: rebooting a whole host under its guests, in the emulated one of `host/`.

Follows section 5 of the paper on RootHammer (figures 5 to 8); docs/host-reboot.md.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
