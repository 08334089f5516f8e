"""Creates, styles and saves the matplotlib figures of all pictures: their size, their colors and their title.

Figures are 1,500 pixels wide, so that they are sharp when a page shows them at half that width. The colors are those of
Okabe and Ito, which color-blind readers can tell apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib takes a second to import, so the functions that draw import it themselves
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7f2e", "#5b5b9f")
INK, MUTED, RULE = "#1f2933", "#6b7780", "#dfe3e8"
"""The colors of text, of less important text, and of lines."""

WIDTH, DPI = 10.0, 150
"""The width of a figure in inches, and the pixels in each."""

LEFT = 0.35
"""The margin on both sides, in inches."""


def mixed(colour: str, part: float, other: float = 1) -> tuple[float, ...]:
    """Returns a color mixed with white (``other`` = 1) or black (0), as (red, green, blue) from 0 to 1.

    ``colour`` is text such as "#0072b2", and ``part`` is its share in the mixture.
    """
    return tuple(part * int(colour[a : a + 2], 16) / 255 + (1 - part) * other for a in (1, 3, 5))


def new_figure(height: float) -> Figure:
    """Returns an empty, white matplotlib figure of ``height`` inches, as wide as all pictures."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)  # not pyplot, because its list of figures is global
    return figure


def add_title(figure: Figure, title: str, words: str) -> None:
    """Writes a title at the top left of a figure, and less important words at the top right."""
    top = 1 - 0.42 / figure.get_figheight()
    figure.text(LEFT / WIDTH, top, title, fontsize=16, weight="bold", color=INK, va="center")
    figure.text(1 - LEFT / WIDTH, top, words, fontsize=11.5, color=MUTED, va="center", ha="right")


def style_axes(axes: Axes) -> None:
    """Styles matplotlib axes for a curve: horizontal grid lines, margins, and few ticks, at whole numbers along x."""
    from matplotlib.ticker import MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(RULE)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10.5, labelcolor=MUTED)
    axes.margins(x=0.02, y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a matplotlib figure as the PNG file ``path`` and returns ``path``; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": "shardwright"})
    return path
