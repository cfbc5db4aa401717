"""Topic `protect`: what checkpoints cost a guest, by turns with QEMU's own snapshots.

Follows sections V-B and V-C of the HydraVM paper (HPL-2011-24): table I, figures 2 and 3.
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
