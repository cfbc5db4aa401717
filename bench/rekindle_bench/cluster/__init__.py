"""Topic `cluster`: how soon a guest answers again after its node has died, and whether two copies of it ever run.

Three Corosync and Pacemaker nodes run as namespaces of this machine (`tests/cluster/bed`).
Follows sections II.B and IV of the HydraVM paper (HPL-2011-24).
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
