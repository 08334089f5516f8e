"""Draws a layout and a training run as PNGs: the ranks and the model state that each stores, and the loss by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwright.formatting import format_bytes, format_count
from shardwright.report.description import STATE_NAMES, STATES, Description
from shardwright.report.drawing import (
    COLOURS,
    DPI,
    INK,
    LEFT,
    MUTED,
    WIDTH,
    add_title,
    mixed,
    new_figure,
    save_figure,
    style_axes,
)
from shardwright.report.outline import (
    MANY_RANKS,
    Grid,
    Rank,
    RankGroup,
    num_grids,
    rank_grids,
    rank_groups,
    shortened,
    slice_letter,
)

if TYPE_CHECKING:  # matplotlib takes a second to import, so the functions that draw import it themselves
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MetricRows = Sequence[Mapping[str, Any]]
"""The lines of ``metrics.jsonl``: one dict of measured values for each training step."""

_STATE_COLOURS = dict(zip(STATES, ("#08519c", "#4a98c9", "#b3d3e8"), strict=True))
_TOP, _HEAD, _CELL = 0.85, 0.34, 0.66  # inches: the top margin, the names over a grid, a grid row
_MOST_GRIDS, _MOST_CELLS = 4, 8


# ---- a layout


def draw_layout(description: Description, path_png: Path) -> Path:
    """Draws a layout as the PNG ``path_png`` and returns the path: a grid of ranks, above a bar of each rank's state.

    The color and the letter of a rank stand for the slice of the parameters that it stores. State is parameters,
    gradients and optimizer state. Large grids are shortened.
    """
    return save_figure(layout_figure(description), path_png)


def layout_figure(description: Description) -> Figure:
    """Returns the matplotlib figure that :func:`draw_layout` saves; the gid of the cell of rank 3 is "rank 3"."""
    grids, total = rank_grids(description), num_grids(description)
    shown = shortened(total, _MOST_GRIDS)
    columns, rows = shortened(grids[0].width, _MOST_CELLS), shortened(grids[0].height, _MOST_CELLS)
    across = 2 if len(shown) > 1 and len(columns) <= 4 else 1
    grid_height = _HEAD * bool(grids[0].columns) + _CELL * len(rows) + 0.28
    groups = _few(rank_groups(description, many=1))
    bars_top = _TOP + grid_height * -(-len(shown) // across) + 0.45
    height = bars_top + 0.36 * len(groups) + 0.35
    figure = new_figure(height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))  # in inches, from the top left
    axes.set_axis_off()
    ranks = f"{description['world_size']:,} rank{'s' * (description['world_size'] > 1)}"
    add_title(figure, description["layout"], f"{ranks}, {format_count(description['num_parameters'])} parameters")
    width = (WIDTH - 2 * LEFT - 0.3 * (across - 1)) / across
    for place, index in enumerate(shown):
        left, top = LEFT + place % across * (width + 0.3), _TOP + place // across * grid_height
        if index is None:
            more = f"{total - _MOST_GRIDS + 1:,} more like these"
            axes.text(left + width / 2, top + grid_height / 2, more, ha="center", fontsize=12, color=MUTED)
        else:
            _draw_grid(axes, grids[min(index, len(grids) - 1)], _Area(left, top, width), columns, rows)
    _draw_memory(axes, groups, bars_top)
    return figure


class _Area(NamedTuple):
    """A place on the figure, in inches from its top left."""

    left: float
    top: float
    width: float


def _few(groups: list[RankGroup]) -> list[RankGroup]:
    """Returns all groups, or if there are many those with the most state and the one with the least."""
    ordered = sorted(groups, key=lambda group: -_state_bytes(group.ranks[0]))
    return groups if len(groups) <= MANY_RANKS else [*ordered[: MANY_RANKS - 1], ordered[-1]]


def _state_bytes(rank: Rank) -> int:
    return sum(rank[state] for state in STATES)


def _draw_grid(axes: Axes, grid: Grid, area: _Area, columns: Sequence[int | None], rows: Sequence[int | None]) -> None:
    """Draws the cells of a grid and the names of its rows and columns; None is a gap in them."""
    gutter = 0.75 if grid.rows else 0.0
    left, top, pitch = area.left + gutter, area.top, (area.width - gutter + 0.1) / max(len(columns), 2)
    if grid.columns:
        axes.text(area.left, top + 0.13, grid.title, va="center", fontsize=11, color=INK, weight="bold")
        for x, column in enumerate(columns):
            name = "" if column is None else f"{grid.columns} {column}"
            axes.text(left + x * pitch + 0.12, top + 0.13, name, va="center", color=MUTED, fontsize=11)
        top += _HEAD
    for y, row in enumerate(rows):
        if row is not None and grid.rows:
            name = f"{grid.rows} {row}"
            axes.text(area.left, top + (y + 0.45) * _CELL, name, va="center", color=MUTED, fontsize=11)
        for x, column in enumerate(columns):
            place = _Area(left + x * pitch, top + y * _CELL, pitch - 0.1)
            if row is None or column is None:
                gap = "\N{VERTICAL ELLIPSIS}" if row is None else "\N{MIDLINE HORIZONTAL ELLIPSIS}"
                middle = place.left + place.width / 2, place.top + 0.45 * _CELL
                axes.text(*middle, gap, ha="center", va="center", color=MUTED, fontsize=14)
            else:
                _draw_rank(axes, grid.cells[row, column], place, "rank " if len(columns) <= 6 else "")


def _draw_rank(axes: Axes, rank: Rank, place: _Area, word: str) -> None:
    """Draws the cell of a rank: its number, the letter of its slice and the bytes of its parameters."""
    from matplotlib.patches import FancyBboxPatch

    left, top, width = place
    # from the ninth slice on the colours repeat, but the letters do not
    colour, right = COLOURS[rank["slice"] % len(COLOURS)], left + width - 0.12
    cell = FancyBboxPatch(
        (left, top), width, _CELL - 0.1, boxstyle="round,pad=0,rounding_size=0.07",
        facecolor=mixed(colour, 0.16), edgecolor=colour, linewidth=1.2, gid=f"rank {rank['rank']}",
    )  # fmt: skip
    axes.add_patch(cell)
    first, second = top + 0.19, top + 0.4
    number, letter = f"{word}{rank['rank']}", slice_letter(rank["slice"])
    size = 10.5 if len(word) or len(number) + len(letter) <= 6 else 8  # as 3071 and DND
    axes.text(left + 0.12, first, number, va="center", fontsize=size, color=INK, weight="bold")
    axes.text(right, first, letter, ha="right", va="center", fontsize=size, color=mixed(colour, 0.7, 0), weight="bold")
    held = format_bytes(rank["parameter_bytes"])
    axes.text(left + 0.12, second, held, va="center", fontsize=9.5, color=MUTED)


def _draw_memory(axes: Axes, groups: Sequence[RankGroup], top: float) -> None:
    """Draws a bar of the state of each group of ranks."""
    from matplotlib.patches import Rectangle

    start, length = 2.45, WIDTH - 2.45 - 1.15
    most = max(_state_bytes(group.ranks[0]) for group in groups) or 1
    axes.text(LEFT, top - 0.25, "State on each rank", fontsize=12, color=INK, weight="bold", va="center")
    right = WIDTH - LEFT
    for state in reversed(STATES):
        key = axes.text(right, top - 0.25, STATE_NAMES[state], fontsize=10.5, color=INK, ha="right", va="center")
        right -= key.get_window_extent().width / DPI + 0.24
        axes.add_patch(Rectangle((right, top - 0.32), 0.14, 0.14, color=_STATE_COLOURS[state], linewidth=0))
        right -= 0.25
    for y, group in enumerate(groups):
        left, at = start, top + 0.36 * y + 0.05
        for state in STATES:
            width = length * group.ranks[0][state] / most
            axes.add_patch(
                Rectangle((left, at), width, 0.25, facecolor=_STATE_COLOURS[state], edgecolor="white", linewidth=0.8)
            )
            left += width
        total = format_bytes(_state_bytes(group.ranks[0]))
        axes.text(left + 0.1, at + 0.13, total, va="center", fontsize=10.5, color=INK)
        axes.text(LEFT, at + 0.13, group.name, va="center", fontsize=10.5, color=INK)


# ---- a run


def draw_loss(rows: MetricRows, path: Path) -> Path:
    """Draws the training loss by step, and the evaluation loss if it was measured, as a PNG; returns its path."""
    return draw_losses({"": rows}, path)


def draw_losses(runs: Mapping[str, MetricRows], path: Path) -> Path:
    """Draws the loss curves of several runs over each other, as a PNG, and returns its path.

    ``runs`` has the metrics of each run by its label. The first curve is the widest, so that equal curves can be seen.
    """
    return save_figure(losses_figure(runs), path)


def losses_figure(runs: Mapping[str, MetricRows]) -> Figure:
    """Returns the matplotlib figure that :func:`draw_losses` saves: a line for each run, and its evaluation losses."""
    figure = new_figure(5.2)
    axes = figure.add_axes((0.075, 0.13, 0.89, 0.72))
    style_axes(axes)
    several = len(runs) > 1
    for n, (label, rows) in enumerate(runs.items()):
        colour = COLOURS[n % len(COLOURS)]
        train, evaluated = _points(rows, "loss"), _points(rows, "eval_loss")
        below = (len(runs) - 1 - n) * min(1, 3 / len(runs))  # how much wider a run is drawn than the last one
        axes.plot(
            *_columns(train), color=mixed(colour, 0.45) if below else colour, linewidth=1.8 + 4 * below,
            marker="o" if len(train) == 1 else "", label=label or "training", solid_capstyle="round",
        )  # fmt: skip
        if evaluated:
            axes.plot(
                *_columns(evaluated), color=colour if several else COLOURS[5], linewidth=0 if several else 1.3,
                marker="o", markersize=5 + 3 * below, markerfacecolor="white", label="" if below else "evaluation",
                zorder=3, clip_on=False,
            )  # fmt: skip
    add_title(figure, "Loss", _loss_words(runs))
    axes.set_xlabel("step", fontsize=11, color=MUTED)
    steps = [step for rows in runs.values() for step, _ in _points(rows, "loss")]
    if not steps:
        axes.set_axis_off()
        axes.text(
            0.5, 0.5, "no finite loss yet", transform=axes.transAxes, ha="center", va="center", fontsize=12,
            color=MUTED,
        )  # fmt: skip
    elif min(steps) == max(steps):
        axes.set_xlim(steps[0] - 0.5, steps[0] + 0.5)

    if len(axes.lines) > 1:
        axes.legend(framealpha=0.9, edgecolor="none", fontsize=11, labelcolor=INK, loc="upper right")
    return figure


def _loss_words(runs: Mapping[str, MetricRows]) -> str:
    """Returns text on the first and last loss of a single run, or on the largest difference of several runs."""
    curves = [dict(_points(rows, "loss")) for rows in runs.values()]
    if len(curves) == 1 and curves[0]:
        first, *_, last = [*curves[0].values()] * 2
        return f"{first:.3f} at first, {last:.3f} at last"
    shared = set[float]().union(*curves).intersection(*curves)
    apart = [max(losses[step] for losses in curves) - min(losses[step] for losses in curves) for step in shared]
    return f"the runs differ by {max(apart):.1e} at most" if apart else ""


def _points(rows: MetricRows, key: str) -> list[tuple[float, float]]:
    """Returns (step, value) of the rows whose value was measured and is finite."""
    points = ((row["step"], row.get(key)) for row in rows)
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
