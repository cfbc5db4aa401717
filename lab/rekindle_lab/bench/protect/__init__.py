"""Topic `protect`: what checkpoints cost a guest, with QEMU's own snapshots in turn.

Follows sections V-B and V-C of the HydraVM paper (HPL-2011-24): table I, figures 2 and 3.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
