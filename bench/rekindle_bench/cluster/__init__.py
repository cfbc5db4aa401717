"""Topic `cluster`: how soon a guest answers again after its node has died, and whether two copies of it ever run.

Three Corosync and Pacemaker nodes run as namespaces of this machine (`tests/cluster/bed`).
Follows sections II.B and IV of the HydraVM paper (HPL-2011-24).
"""

from .cases import CASES
from .plan import FULL, QUICK, Plan
from .topic import analyse, measure

__all__ = ["CASES", "FULL", "QUICK", "Plan", "analyse", "measure"]
