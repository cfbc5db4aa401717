"""Topic `host`: reboots a whole host under its guests. The host is the emulated one of `tests/hosts/`.

Follows section 5 of the paper on RootHammer (figures 5 to 8); docs/host-reboot.md.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
