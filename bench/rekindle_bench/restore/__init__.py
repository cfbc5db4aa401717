"""Topic `restore`: how soon a guest resumes from a checkpoint, and how fast its work is after that.

Follows sections V-D and V-E of the HydraVM paper (HPL-2011-24): figure 4, table II. By default a restored guest runs
immediately and its memory is loaded on demand (*lazy*), while a *pager* loads the rest in the background (the *fill*).
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
