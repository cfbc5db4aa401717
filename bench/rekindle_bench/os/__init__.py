"""Topic `os`: reboots of a guest's system in each way, by stages of its boot, and the rest of a leak; with peers.

Follows sections 3 and 5 of the paper "Towards Fast OS Rejuvenation". A *phase* is a boot snapshot that Rekindle saves
at the end of a part of the boot (`kernel`, `services`), and from which a later reboot resumes; a *candidate* is one
such snapshot.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
