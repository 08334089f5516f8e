"""Draws the predicted costs of layouts: for each, a bar of the parts of its step, and a bar of the memory it takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.formatting import format_seconds
from shardwright.planner.explain import known_parts, name_of_part, parts_of_step
from shardwright.planner.plan_results import Plans
from shardwright.planner.price import Price
from shardwright.report.drawing import COLOURS, DPI, INK, LEFT, MUTED, RULE, WIDTH, add_title, new_figure, save_figure

if TYPE_CHECKING:  # matplotlib takes a second to import, so the functions that draw import it themselves
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_LAYOUTS = 10
_HEAD, _ROW, _KEY = 0.85, 0.62, 0.3  # inches: the title, a layout's name with its bar, a line of the legend
_STEP_WIDTH, _MEMORY_LEFT = 4.5, 7.75  # inches: the longest bar of seconds, and where the bars of memory begin
_NO_FIT = "#d55e00"
_GREYS = {"launch": "#9aa5b1", "bubble": "#d5dae0", "other": "#52606d"}
"""Parts in which no device computes or sends, without a color of their own."""


def draw_plans(plans: Plans, path_png: Path) -> Path:
    """Draws the first ten layouts of ``plans``, the best first, as a PNG, and returns its path.

    Each has a bar of the predicted seconds of its step, by part, and a bar of its memory with the limit.
    """
    return save_figure(plans_figure(plans), path_png)


def plans_figure(plans: Plans) -> Figure:
    """Returns the matplotlib figure that :func:`draw_plans` saves.

    The gid of a bar of seconds is "LAYOUT: PART", and that of a bar of memory "LAYOUT: memory of a device".
    """
    shown = plans.layouts[:_MOST_LAYOUTS]
    parts = parts_of_step(*(price.waterfall for price in shown))
    # the same color for a part in every picture
    coloured = [name for name in dict.fromkeys([*known_parts(), *parts]) if name not in _GREYS]
    palette = {name: COLOURS[n % len(COLOURS)] for n, name in enumerate(coloured)}
    colours = {name: _GREYS.get(name) or palette[name] for name in parts}
    columns = 4
    keys_height = _KEY * -(-len(parts) // columns) + 0.15
    height = _HEAD + keys_height + _ROW * len(shown) + 0.5
    figure = new_figure(height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))  # in inches, from the top left
    axes.set_axis_off()
    add_title(figure, "Predicted step and memory", f"{plans.cluster}, {plans.batch:,} samples a step")
    for n, name in enumerate(parts):
        left, top = LEFT + n % columns * 2.35, _HEAD + n // columns * _KEY
        _bar(axes, left, top, 0.14, 0.14, colours[name])
        axes.text(left + 0.22, top + 0.07, name_of_part(name), va="center", fontsize=10.5, color=INK)
    longest = max(price.step_s for price in shown)
    most = max(plans.cluster.device.memory_bytes, *(price.memory_bytes for price in shown))
    top = _HEAD + keys_height
    for n, price in enumerate(shown):
        _draw_row(axes, plans, price, top + n * _ROW, longest, most, colours)
    bottom = top + _ROW * len(shown)
    axes.text(LEFT, bottom + 0.2, "seconds of a step, by part", fontsize=10.5, color=MUTED, va="center")
    words = f"memory of the fullest device; the line is the limit, {plans.memory_limit:.0%}"
    axes.text(WIDTH - LEFT, bottom + 0.2, words, fontsize=10.5, color=MUTED, va="center", ha="right")
    return figure


def _draw_row(
    axes: Axes, plans: Plans, price: Price, top: float, longest: float, most: float, colours: dict[str, str]
) -> None:
    """Draws one layout: its line, and under it the bar of its step and the bar of its memory."""
    fits = plans.fits(price)
    axes.text(LEFT, top + 0.1, str(price.layout), va="center", fontsize=10.5, color=INK, weight="bold")
    at, height, left = top + 0.22, 0.22, LEFT
    for name, colour in colours.items():
        width = _STEP_WIDTH * price.waterfall.get(name, 0.0) / longest
        if width:
            _bar(axes, left, at, width, height, colour, f"{price.layout}: {name}")
            left += width
    expected = format_seconds(plans.expected_s(price.step_s))
    said = f"{format_seconds(price.step_s)}, expect {expected}, {plans.utilisation(price):.0%} of peak"
    axes.text(left + 0.08, at + height / 2, said, va="center", fontsize=10, color=INK)
    full = WIDTH - LEFT - _MEMORY_LEFT
    width = full * price.memory_bytes / most
    _bar(axes, _MEMORY_LEFT, at, full, height, RULE)
    _bar(axes, _MEMORY_LEFT, at, width, height, COLOURS[0] if fits else _NO_FIT, f"{price.layout}: memory of a device")
    limit = _MEMORY_LEFT + full * plans.cluster.device.memory_bytes * plans.memory_limit / most
    axes.plot([limit, limit], [at - 0.02, at + height + 0.02], color=INK, linewidth=1.4)
    memory = f"{price.memory_bytes / 1e9:.3g} GB" + ("" if fits else ", does not fit")
    axes.text(_MEMORY_LEFT, top + 0.1, memory, va="center", fontsize=10, color=INK if fits else _NO_FIT)


def _bar(axes: Axes, left: float, top: float, width: float, height: float, colour: str, name: str = "") -> None:
    from matplotlib.patches import Rectangle

    bar = Rectangle((left, top), width, height, facecolor=colour, edgecolor="white", linewidth=0.0005 * DPI)
    if name:
        bar.set_gid(name)
    axes.add_patch(bar)
