"""The full plan, and the quick plan of 8 minutes: windows and page loads."""

from dataclasses import dataclass

from rekindle_bench.omissions import fewer


@dataclass(frozen=True)
class Plan:
    """Sizes and repetitions."""

    guests: int
    cost_windows: int
    """Windows in which the server is scraped."""
    cost_s: float
    """Length of each, in seconds."""
    scrape_s: float
    """Time between scrapes, in seconds."""
    loads: int
    """Page loads."""
    frame_windows: int
    """Windows in which the page is scrolled."""
    frames_s: float
    """Length of each, in seconds."""
    budget_s: float | None = None
    """No case begins later than this many seconds after the start."""


FULL = Plan(guests=200, cost_windows=8, cost_s=60.0, scrape_s=15.0, loads=20, frame_windows=10, frames_s=6.0)
QUICK = Plan(
    guests=200, cost_windows=4, cost_s=60.0, scrape_s=15.0, loads=10, frame_windows=5, frames_s=6.0, budget_s=400.0
)


def left_out(plan: Plan) -> list[str]:
    """Lists the repetitions that `plan` omits from the full plan."""
    return [
        *fewer("windows of scrapes", plan.cost_windows, FULL.cost_windows),
        *fewer("page loads", plan.loads, FULL.loads),
        *fewer("windows of scrolling", plan.frame_windows, FULL.frame_windows),
    ]
