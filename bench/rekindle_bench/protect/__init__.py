"""Topic `protect`: what checkpoints cost a guest, by turns with QEMU's own snapshots.

Follows sections V-B and V-C of the HydraVM paper (HPL-2011-24): table I, figures 2 and 3. A *protector* (`rekindle
protect`) commits checkpoints of a running guest to a *store*.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
