"""Topic `host`: reboots a whole host under its guests. The host is the emulated one of `tests/hosts/`.

Follows section 5 of the paper on RootHammer (figures 5 to 8); docs/host-reboot.md.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
