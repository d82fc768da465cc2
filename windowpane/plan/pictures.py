"""How pictures look: light, large enough to read, and told apart by more than colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Okabe and Ito's colours, which people with any kind of colour blindness tell apart.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, INK = "#CC79A7", "#56B4E9", "#9A9A9A", "#222222"
LINES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", "--", (0, (5, 1)), "-.", ":", (0, (3, 1, 1, 1)))
GIB = 2**30
DPI = 150
HEADING = 0.75


def figure(width: float, heights: Sequence[float], title: str, subtitle: str) -> tuple[Figure, list[SubFigure]]:
    """A figure without global state: a heading, and below it one part for each height (in inches)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
    made = Figure(figsize=(width, HEADING + sum(heights)), facecolor="white", layout=engine)
    rows = made.subfigures(1 + len(heights), 1, height_ratios=[HEADING, *heights], squeeze=False, hspace=0.04)
    heading, *parts = (row[0] for row in rows)
    heading.text(0.012, 0.68, title, ha="left", va="center", fontsize=14, fontweight="bold", color=INK)
    heading.text(0.012, 0.22, subtitle, ha="left", va="center", fontsize=10, color="#555555")
    return made, parts


def quiet(axes: Axes, title: str, grid: str = "y") -> None:
    """Only the lines that help to read values."""
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=10)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color="#E3E3E3", linewidth=0.8)  # type: ignore[arg-type]
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#999999")
    axes.tick_params(which="both", colors=INK, labelsize=9)


def save(made: Figure, path: str) -> None:
    """PNG or SVG, by the name's ending. SVGs carry no date, so that the same plan gives the same file."""
    is_svg = path.lower().endswith(".svg")
    made.savefig(path, dpi=DPI, metadata={"Date": None} if is_svg else None)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The same values in the same order, moved apart so that labels at them do not overlap."""
    order = sorted(range(len(values)), key=lambda at: values[at])
    moved = list(values)
    for lower, upper in pairwise(order):
        moved[upper] = max(moved[upper], moved[lower] + gap)
    return moved
