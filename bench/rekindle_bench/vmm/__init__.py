"""Topic `vmm`: warm, saved and cold reboots of the VMM, and QEMU's `cpr-transfer`, in turn.

Follows sections 5.1, 5.3 and 5.4 of the RootHammer paper (TDSC 2010): figures 5 to 8.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
