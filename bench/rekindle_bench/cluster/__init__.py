"""Topic `cluster`: how soon a guest answers again after its node has died, and whether two copies of it ever run.

Three Corosync and Pacemaker nodes run as namespaces of this machine (`tests/cluster/bed`): the *bed*. A node that is
not known to be dead is *fenced* (powered off) before its guest resumes elsewhere. The guest counts *ticks* of 50 ms, so
that a client sees what a fail-over loses. With *output commit* the guest's answers wait for a checkpoint.
Follows sections II.B and IV of the HydraVM paper (HPL-2011-24).
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
