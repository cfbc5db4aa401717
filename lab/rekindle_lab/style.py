"""The style of figures: one colour, marker and line for each way to reboot, in colours safe for colour blindness."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Palette of Okabe and Ito.
COLOURS = {"warm": "#0072B2", "cpr-transfer": "#E69F00", "saved": "#009E73", "cold": "#D55E00"}
MARKERS = {"warm": "o", "cpr-transfer": "s", "saved": "^", "cold": "D"}
LINES = {"warm": "-", "cpr-transfer": "--", "saved": "-.", "cold": ":"}
# Of a reboot, as bars above its throughput.
PHASES = {"prepare": "#BBBBBB", "suspend": "#CC79A7", "renew": "#E69F00", "resume": "#56B4E9", "settle": "#777777"}
FALLBACK = "#555555"
"""Colour of what has none of its own."""


def apply() -> None:
    """Sets the common style."""
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": "#DDDDDD",
            "grid.linewidth": 0.8,
            "axes.axisbelow": True,
            "legend.frameon": False,
            "figure.dpi": 100,
            "savefig.dpi": 150,
        }
    )


def duration(value_ms: float) -> str:
    """Formats a duration in ms for people: with three digits, in the unit that fits."""
    if value_ms < 1:
        return f"{value_ms * 1e3:.3g} µs"
    if value_ms < 1000:
        return f"{value_ms:.3g} ms"
    return f"{value_ms / 1e3:.3g} s"


def logarithmic_ms(axes: Axes, values_ms: Sequence[float]) -> None:
    """Sets a logarithmic y axis around values in ms, its ticks in the usual units."""
    if not values_ms:
        return
    low, high = min(values_ms) / 1.6, max(values_ms) * 1.6
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    steps = (1.0, 2.0, 5.0) if high < 300 * max(low, 1e-6) else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def title(figure: Figure, text: str) -> None:
    """Sets the title of a whole figure."""
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as PNG and closes it."""
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def shared_legend(figure: Figure, panels: Iterable[Axes], *, ncols: int, order: Sequence[str] | None = None) -> None:
    """Adds one legend below all panels, with each label once; `order`: of the labels, if not that of the panels."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [label for label in order or handles if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=ncols)
