"""Topic `libvirt`: replacements and checkpoints of domains that libvirt has started, unprepared.

The peer is libvirt's own way to give a domain a new QEMU, `virsh managedsave` and `virsh start`.
"""

from .plan import Checkpoints, Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Checkpoints", "Plan"]
