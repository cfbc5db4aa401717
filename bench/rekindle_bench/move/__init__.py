"""Topic `move`: a running guest moves to another host, by `rekindle move` and by QEMU's live and non-live migration.

Follows section 6.2 of the RootHammer paper (TDSC 2010): the downtime of a non-live migration (D_m), the whole time of a
live one (M_l), and by how much the guest's service slows down meanwhile (gamma).
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
