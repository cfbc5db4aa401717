"""Topic `store`: checkpoints in an object store, a real Ceph with an S3 gateway on this machine.

How long a commit takes compared with a PUT of as many bytes, how soon a guest resumes from it compared with Rekindle's
own server, and whether two hosts ever own a store at the same time.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
