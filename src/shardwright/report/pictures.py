"""Pictures of a layout and of a run, as PNGs 1,500 pixels wide: sharp at half that width.

Colours are Okabe and Ito's, which stay apart for the colour-blind; a letter or a dash says the same again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shardwright.report.description import STATES, Description
from shardwright.report.outline import Grid, Rank, rank_grids, rank_groups, shortened, slice_letter
from shardwright.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:  # matplotlib takes a second to import, so only who draws waits for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
"""The lines of ``metrics.jsonl``."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7f2e", "#5b5b9f")
_INK, _MUTED, _RULE = "#1f2933", "#6b7780", "#dfe3e8"
_STATE_COLOURS = dict(zip(STATES, ("#0072b2", "#56b4e9", "#e69f00"), strict=True))
_STATE_NAMES = dict(zip(STATES, ("parameters", "gradients", "optimizer (AdamW)"), strict=True))
_WIDTH, _DPI = 10.0, 150  # inches, and pixels in each


# ---- a layout


def draw_layout(description: Description, path_png: Path) -> Path:
    """The grid of ranks, coloured by the slice that each holds, above the memory of each rank. Returns the path.

    >>> import tempfile
    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.report import describe
    >>> from shardwright.strategy import Job
    >>> found = describe(Job(nn.Linear(4, 4), nn.Identity()), Layout.parse("dp2"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_layout(found, Path(folder) / "layout.png").read_bytes()[1:4]
    b'PNG'
    """
    return _save(layout_figure(description), path_png)


def layout_figure(description: Description) -> Figure:
    """The figure that ``draw_layout`` saves; each cell's id is ``rank`` and its number.

    >>> ranks = [{"rank": r, "coord": {"dp": r}, "slice": 0, "parameter_bytes": 8, "gradient_bytes": 8,
    ...           "optimizer_bytes": 16} for r in range(3)]
    >>> figure = layout_figure({"layout": "dp3", "world_size": 3, "mesh": {"dp": 3}, "num_parameters": 2,
    ...                         "ranks": ranks})
    >>> [cell.get_gid() for cell in figure.axes[0].patches]
    ['rank 0', 'rank 1', 'rank 2']
    """
    grids = rank_grids(description)
    shown = shortened(len(grids), 4)
    tall, wide = len(shortened(len(grids[0].cells), 8)), len(shortened(len(grids[0].cells[0]), 8))
    across = 2 if len(shown) > 1 and wide <= 4 else 1
    down = -(-len(shown) // across)
    grid_height = 0.62 * tall + 0.75
    groups = _few(rank_groups(description))
    bars_height = 0.34 * len(groups) + 1.15
    height = 0.95 + down * grid_height + bars_height
    figure = _figure(height)
    ranks = f"{description['world_size']:,} rank{'s' * (description['world_size'] > 1)}"
    _title(figure, description["layout"], f"{ranks}, {format_count(description['num_parameters'])} parameters")
    for place, index in enumerate(shown):
        column, row = place % across, place // across
        top = height - 0.95 - row * grid_height
        left, width = 0.03 + column * 0.97 / across, 0.94 / across
        axes = figure.add_axes((left, (top - grid_height) / height, width, grid_height / height))
        if index is None:
            _note(axes, f"{len(grids) - 3:,} more like these")
        else:
            _draw_grid(axes, grids[index], wide)
    axes = figure.add_axes((0.2, 0.55 / height, 0.68, (bars_height - 1.1) / height))
    _draw_memory(axes, groups)
    return figure


def _few(groups: list[tuple[str, list[Rank]]]) -> list[tuple[str, list[Rank]]]:
    """Some of many groups: those that hold most and least come first of all a person asks for."""
    if len(groups) <= 16:
        return groups
    return sorted(groups, key=lambda group: -sum(group[1][0][state] for state in STATES))[:15] + [
        min(groups, key=lambda group: sum(group[1][0][state] for state in STATES))
    ]


def _draw_grid(axes: Axes, grid: Grid, wide: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.set_axis_off()
    columns, rows = shortened(len(grid.cells[0]), 8), shortened(len(grid.cells), 8)
    axes.set_xlim(-0.75, max(wide, 2))
    axes.set_ylim(len(rows) + 0.1, -0.75)
    if grid.title:
        axes.text(-0.08, -0.28, grid.title, ha="right", va="center", fontsize=11, color=_INK, weight="bold")
    for x, column in enumerate(columns):
        if column is not None and grid.columns:
            axes.text(x + 0.5, -0.28, f"{grid.columns} {column}", ha="center", va="center", color=_MUTED, fontsize=11)
    for y, row in enumerate(rows):
        if row is not None and grid.rows:
            axes.text(-0.08, y + 0.5, f"{grid.rows} {row}", ha="right", va="center", color=_MUTED, fontsize=11)
        for x, column in enumerate(columns):
            if row is None or column is None:
                gap = "\N{VERTICAL ELLIPSIS}" if row is None else "\N{MIDLINE HORIZONTAL ELLIPSIS}"
                axes.text(x + 0.5, y + 0.5, gap, ha="center", va="center", color=_MUTED, fontsize=14)
                continue
            rank = grid.cells[row][column]
            colour = slice_colour(rank["slice"])
            cell = FancyBboxPatch(
                (x + 0.06, y + 0.08), 0.88, 0.84, boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=_tint(colour), edgecolor=colour, linewidth=1.2, gid=f"rank {rank['rank']}",
            )  # fmt: skip
            axes.add_patch(cell)
            text = f"rank {rank['rank']}  {slice_letter(rank['slice'])}"
            axes.text(x + 0.5, y + 0.36, text, ha="center", va="center", fontsize=10.5, color=_INK, weight="bold")
            held = format_bytes(rank["parameter_bytes"])
            axes.text(x + 0.5, y + 0.68, held, ha="center", va="center", fontsize=9.5, color=_MUTED)


def _draw_memory(axes: Axes, groups: Sequence[tuple[str, list[Rank]]]) -> None:
    most = max(sum(group[0][state] for state in STATES) for _, group in groups) or 1
    for y, (_, group) in enumerate(groups):
        left = 0
        for state in STATES:
            axes.barh(y, group[0][state], left=left, height=0.66, color=_STATE_COLOURS[state], linewidth=0)
            left += group[0][state]
        axes.text(left + most * 0.012, y, format_bytes(left), va="center", fontsize=10, color=_INK)
    names = [f"rank {name}" if len(group) == 1 else f"{len(group):,} ranks: {name}" for name, group in groups]
    axes.set_yticks(range(len(groups)), names)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.0)
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=10, labelcolor=_INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title("state on each rank", loc="left", fontsize=12, color=_INK, weight="bold", pad=12)
    from matplotlib.patches import Patch

    keys = [Patch(color=_STATE_COLOURS[state], label=_STATE_NAMES[state]) for state in STATES]
    axes.legend(
        handles=keys, loc="upper center", bbox_to_anchor=(0.4, 0.0), ncols=3, frameon=False, fontsize=10,
        labelcolor=_INK, handlelength=1.0, handleheight=1.0,
    )  # fmt: skip


# ---- a run


def draw_loss(rows: Rows, path: Path) -> Path:
    """The loss by step, of training and, where it was measured, of evaluation. Returns the path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_loss([{"step": 1, "loss": 3.0}], Path(folder) / "loss.png").read_bytes()[1:4]
    b'PNG'
    """
    return draw_losses({"": rows}, path)


def draw_losses(runs: Mapping[str, Rows], path: Path) -> Path:
    """The losses of several runs over each other; runs that agree stay visible as bands of one line."""
    return _save(losses_figure(runs), path)


def losses_figure(runs: Mapping[str, Rows]) -> Figure:
    """The figure that ``draw_losses`` saves: one line for each run, and one for its evaluations.

    >>> figure = losses_figure({"single": [{"step": 1, "loss": 3.0}], "dp2": [{"step": 1, "loss": 3.0}]})
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['single', 'dp2']
    """
    figure = _figure(5.2)
    axes = figure.add_axes((0.085, 0.13, 0.885, 0.72))
    _style(axes)
    several = len(runs) > 1
    for n, (label, rows) in enumerate(runs.items()):
        colour, name = COLOURS[n % len(COLOURS)], label or "training"
        train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
        evaluated = [(row["step"], row["eval_loss"]) for row in rows if row.get("eval_loss") is not None]
        width = 2.0 + 2.6 * (len(runs) - 1 - n) / max(1, len(runs) - 1) * several  # the first lies broad below the rest
        axes.plot(
            *_columns(train), color=colour, linewidth=width, label=name, marker="o" if len(train) == 1 else "",
            solid_capstyle="round", linestyle=("-", "-", (0, (5, 2)), (0, (1, 1.5)))[n % 4],
        )  # fmt: skip
        if evaluated:
            axes.plot(
                *_columns(evaluated), color=colour if several else COLOURS[5], linewidth=1.3, marker="o", markersize=5,
                markerfacecolor="white", label=f"{label}, evaluation" if several else "evaluation", linestyle=":",
            )  # fmt: skip
    _title(figure, "Loss", _loss_words(runs))
    axes.set_xlabel("step", fontsize=11, color=_MUTED)
    if not any(math.isfinite(row.get("loss", math.nan)) for rows in runs.values() for row in rows):
        _note(axes, "no finite loss yet")
    if len(axes.lines) > 1:
        axes.legend(frameon=False, fontsize=11, labelcolor=_INK, loc="upper right")
    return figure


def _loss_words(runs: Mapping[str, Rows]) -> str:
    losses = {name: [row["loss"] for row in rows if "loss" in row] for name, rows in runs.items()}
    found = [values for values in losses.values() if values]
    if len(runs) == 1 and found:
        return f"{found[0][0]:.3f} at first, {found[0][-1]:.3f} at last"
    shared = [max(at) - min(at) for at in zip(*found, strict=False)]
    return f"largest difference between the runs: {max(shared):.1e}" if len(found) > 1 else ""


def draw_speed(rows: Rows, path: Path) -> Path:
    """Tokens per second and milliseconds per step, by step, with their medians. Returns the path."""
    return _save(speed_figure(rows), path)


def speed_figure(rows: Rows) -> Figure:
    """The figure that ``draw_speed`` saves: two panels with a line and its median.

    >>> figure = speed_figure([{"step": 1, "tokens_per_s": 1000.0, "step_ms": 64.0}])
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['tokens/s: median 1.0 k', 'time of a step: median 64 ms']
    """
    figure = _figure(5.8)
    _title(figure, "Speed", f"{len(rows):,} step{'s' * (len(rows) != 1)}")
    panels = (
        (0.51, "tokens_per_s", "tokens/s", format_count, COLOURS[0]),
        (0.115, "step_ms", "time of a step", lambda ms: format_duration(ms / 1000), COLOURS[5]),
    )
    for bottom, key, name, spell, colour in panels:
        axes = figure.add_axes((0.105, bottom, 0.865, 0.285))
        _style(axes)
        points = [(row["step"], row[key]) for row in rows if key in row]
        axes.plot(*_columns(points), color=colour, linewidth=1.6, marker="o" if len(points) == 1 else "")
        middle = median(value for _, value in points) if points else 0.0
        axes.set_title(
            f"{name}: median {spell(middle)}" if points else f"{name}: not measured yet",
            loc="left", fontsize=11.5, color=_INK, pad=8,
        )  # fmt: skip
        if points:
            axes.axhline(middle, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylim(0, 1.15 * max((value for _, value in points), default=1) or 1)
        axes.yaxis.set_major_formatter(lambda value, _, spell=spell: spell(value) if value else "0")
    axes.set_xlabel("step", fontsize=11, color=_MUTED)
    return figure


# ---- style


def slice_colour(index: int) -> str:
    """The colour of a slice: one of eight; from the ninth on they come round again, the letters do not."""
    return COLOURS[index % len(COLOURS)]


def _tint(colour: str, part: float = 0.16) -> tuple[float, ...]:
    """A colour thinned with white."""
    return tuple(1 - part * (1 - int(colour[a : a + 2], 16) / 255) for a in (1, 3, 5))


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)  # no pyplot: its list of figures is global
    return figure


def _title(figure: Figure, title: str, words: str) -> None:
    top = 1 - 0.42 / figure.get_figheight()
    figure.text(0.03, top, title, fontsize=16, weight="bold", color=_INK, va="center")
    figure.text(0.97, top, words, fontsize=11.5, color=_MUTED, va="center", ha="right")


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_RULE)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10.5, labelcolor=_MUTED)
    axes.margins(x=0.02, y=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _note(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=12, color=_MUTED)


def _save(figure: Figure, path: Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": "shardwright"})
    return path
