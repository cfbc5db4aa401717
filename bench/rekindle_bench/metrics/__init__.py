"""Topic `metrics`: `rekindle metrics` on a host with 200 guests, which are invented.

How much processor time it needs while Prometheus scrapes it, how soon its page can be used, and how smoothly that
scrolls.
"""

from .plan import Plan
from .topic import TOPIC

__all__ = ["TOPIC", "Plan"]
