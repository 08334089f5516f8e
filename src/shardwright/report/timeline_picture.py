"""Draws pipeline timelines as a PNG: a row of colored actions for each stage, and below them each stage's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardwright.formatting import format_bytes
from shardwright.plan.schedule import ActionKind
from shardwright.report.drawing import COLOURS, DPI, INK, LEFT, MUTED, RULE, WIDTH, mixed, new_figure, save_figure
from shardwright.report.timeline_outline import (
    KINDS,
    NOTHING,
    TimelineOutline,
    TimeUnit,
    outlines,
    percent,
    spread,
    ticks,
    time_unit,
    times_as_long,
)
from shardwright.runtime.timeline import Timeline

if TYPE_CHECKING:  # matplotlib takes a second to import, so the functions that draw import it themselves
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

KIND_COLOURS: dict[ActionKind, str] = {"F": COLOURS[4], "B": COLOURS[1], "I": COLOURS[3], "W": COLOURS[2]}
"""The color of each kind of action: of Okabe and Ito, light enough for dark numbers on them."""

_IDLE = "#eef1f4"
_TOP, _HEAD, _AXIS, _GAP = 1.42, 0.26, 0.32, 0.42  # inches: to the first timeline, its name, tick labels, to the next
_ROW, _MOST_HEIGHT, _EMPTY, _MEMORY = 0.34, 3.9, 0.7, 1.05  # inches: a stage, all stages, no stage, a panel of memory
_START, _END = 1.15, WIDTH - 1.0  # inches from the left: the two ends of the axis of time
_FONT, _SMALL_FONT, _DIGIT = 9.5, 5.5, 0.66 / 72  # points, points, and the width of a digit in inches for each point
_MANY_LINES = 6
_FIRST_LINE, _LAST_LINE = (0.1, 0.15, 0.45), (0.84, 0.37, 0.0)


class _Sizes(NamedTuple):
    """The scales of a figure: the axis of time ends at ``end`` in ``unit``; ``row`` is a stage's height in inches."""

    unit: TimeUnit
    end: float
    row: float
    most_bytes: int

    def inches(self, duration_s: float) -> float:
        """Returns the width in inches of a duration in seconds."""
        return duration_s / self.unit.size_s / self.end * (_END - _START)


def draw_timelines(path: Path, timelines: Sequence[Timeline], title: str = "Timeline") -> Path:
    """Draws pipeline timelines as a PNG on one time axis, each above its memory if that is known. Returns the path.

    Gray is idle time; later chunks of a stage are lighter. Any number of stages and actions can be drawn: if most
    actions are narrower than two pixels, each pixel has the mean color. Without actions, the picture says so.
    """
    return save_figure(timelines_figure(timelines, title), path)


def timelines_figure(timelines: Sequence[Timeline], title: str = "Timeline") -> Figure:
    """Returns the matplotlib figure that :func:`draw_timelines` saves: each timeline's stages and their memory."""
    drawn = outlines(timelines) or outlines([Timeline("no timeline", ())])
    longest = max(outline.makespan_s for outline in drawn)
    unit = time_unit(longest)
    row = min(_ROW, *(_MOST_HEIGHT / max(len(outline.spans), 1) for outline in drawn))
    sizes = _Sizes(unit, longest / unit.size_s or 1.0, row, max(max(o.peaks, default=0) for o in drawn))
    figure = new_figure(_TOP + sum(_HEAD + _height(outline, sizes) + _AXIS + _GAP for outline in drawn))
    words = _write(figure, WIDTH - LEFT, 0.42, times_as_long(drawn), 5.5, ha="right", fontsize=11, color=MUTED)
    room = WIDTH - 2 * LEFT - 0.3 - _inches(words)
    _write(figure, LEFT, 0.42, title, room, least=10.5, fontsize=16, weight="bold")
    _draw_legend(figure, drawn)
    top = _TOP
    for outline in drawn:
        summary = outline.summary if outline.makespan_s else ""
        words = _write(figure, _END, top, summary, 6.0, ha="right", fontsize=11, color=MUTED)
        name = outline.name.removeprefix(f"{title}, ")  # the title is written above
        room = _END - LEFT - 0.3 - _inches(words)
        _write(figure, LEFT, top, name, room, fontsize=12, weight="bold")
        top += _HEAD
        _draw_timeline(figure, top, outline, sizes)
        top += _height(outline, sizes) + _AXIS + _GAP
    mixed = "; mixed colours: actions too narrow for a pixel" * any(_many(outline, sizes) for outline in drawn)
    style: dict[str, Any] = {"ha": "center", "fontsize": 11, "color": MUTED}
    _write(figure, (_START + _END) / 2, top - _GAP, f"time, {unit.name}{mixed}", 7.0, **style)
    return figure


def _height(outline: TimelineOutline, sizes: _Sizes) -> float:
    """Returns the height of a timeline's panels in inches."""
    if not outline.makespan_s:
        return _EMPTY
    return len(outline.spans) * sizes.row + (0.14 + _MEMORY) * any(outline.peaks)


def _draw_timeline(figure: Figure, top: float, outline: TimelineOutline, sizes: _Sizes) -> None:
    """Draws the rows, bubbles and memory of a timeline below ``top`` inches."""
    if not outline.makespan_s:
        axes = _panel(figure, top, _EMPTY, sizes)
        axes.set_axis_off()
        axes.text(0.5, 0.5, NOTHING, transform=axes.transAxes, ha="center", va="center", fontsize=12, color=MUTED)
        return
    rows = _panel(figure, top, len(outline.spans) * sizes.row, sizes)
    _draw_rows(rows, outline, sizes)
    if sizes.row >= 0.15:
        _write(figure, _END + 0.12, top - _HEAD, "bubble", 0.85, fontsize=_FONT, color=MUTED)
        for stage, bubble in enumerate(outline.bubbles):
            at = top + (stage + 0.5) * sizes.row
            _write(figure, _END + 0.12, at, percent(bubble), 0.85, fontsize=_FONT, color=MUTED)
    if any(outline.peaks):
        rows.tick_params(labelbottom=False)
        _draw_memory(figure, top + _height(outline, sizes) - _MEMORY, outline, sizes)


def _panel(figure: Figure, top: float, height: float, sizes: _Sizes) -> Axes:
    """Returns matplotlib axes over the time axis, ``top`` inches below the figure's top."""
    whole = figure.get_figheight()
    place = (_START / WIDTH, 1 - (top + height) / whole, (_END - _START) / WIDTH, height / whole)
    axes = figure.add_axes(place, xlim=(0, sizes.end))
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=10, labelcolor=MUTED)
    axes.set_xticks(ticks(sizes.end, 9))
    return axes


def _draw_rows(axes: Axes, outline: TimelineOutline, sizes: _Sizes) -> None:
    """Draws the actions of each stage as boxes on a grey row of idle time."""
    from matplotlib.collections import PolyCollection

    num_stages, second = len(outline.spans), sizes.unit.size_s
    axes.set_ylim(num_stages, 0)
    end, inset = outline.makespan_s / second, 0.06 if sizes.row >= 0.15 else 0.0
    axes.barh([n + 0.5 for n in range(num_stages)], end, height=1 - 2 * inset, color=_IDLE, linewidth=0, zorder=0)
    named = range(num_stages) if num_stages <= 16 else [int(tick) for tick in ticks(num_stages - 1, 9)]
    axes.set_yticks([stage + 0.5 for stage in named], [f"stage {stage}" for stage in named])
    if _many(outline, sizes):
        _draw_many(axes, outline, end)
        return
    # one collection for each colour: thousands of single patches would take minutes to draw
    alike: dict[tuple[ActionKind, int, int], list[list[tuple[float, float]]]] = {}
    for stage, spans in enumerate(outline.spans):
        top, bottom, places = stage + inset, stage + 1 - inset, outline.chunks[stage]
        for (kind, _, chunk), start_s, end_s in spans:
            left, right = start_s / second, end_s / second
            box = [(left, top), (right, top), (right, bottom), (left, bottom)]
            alike.setdefault((kind, places[chunk], len(places)), []).append(box)
    middle = _middle_inches(outline, sizes)
    line = 0.8 if middle > 0.06 else 0.4 if middle > 0.03 else 0.0
    for key, boxes in alike.items():
        axes.add_collection(
            PolyCollection(boxes, facecolor=shade(*key), edgecolor="white", linewidth=line, antialiased=line > 0)
        )
    _draw_numbers(axes, outline, sizes)


def _middle_inches(outline: TimelineOutline, sizes: _Sizes) -> float:
    """Returns the median width of the actions in inches."""
    return sizes.inches(median(end - start for stage in outline.spans for _, start, end in stage))


def _many(outline: TimelineOutline, sizes: _Sizes) -> bool:
    """Returns whether most actions are narrower than two pixels."""
    return outline.makespan_s > 0 and _middle_inches(outline, sizes) * DPI < 2


def _draw_many(axes: Axes, outline: TimelineOutline, end: float) -> None:
    """Draws actions narrower than two pixels: each pixel shows the mean color over its time.

    Interpolating the busy time at the edges of pixels gives the exact share of every color without a loop over pixels.
    """
    num_stages, num_pixels = len(outline.spans), round((_END - _START) * DPI)
    edges = np.linspace(0, outline.makespan_s, num_pixels + 1)
    idle = np.array(mixed(_IDLE, 1))
    pixels = np.tile(idle, (num_stages, num_pixels, 1))
    for stage, spans in enumerate(outline.spans):
        alike: dict[tuple[ActionKind, int, int], list[tuple[float, float]]] = {}
        for (kind, _, chunk), start_s, end_s in spans:
            key = (kind, outline.chunks[stage][chunk], len(outline.chunks[stage]))
            alike.setdefault(key, []).append((start_s, end_s))
        for key, of_key in alike.items():
            times = np.array(of_key)
            busy_s = np.repeat(np.cumsum(times[:, 1] - times[:, 0]), 2)  # busy time up to each start and each end
            busy_s[0::2] -= times[:, 1] - times[:, 0]
            share = np.diff(np.interp(edges, times.ravel(), busy_s)) * num_pixels / outline.makespan_s
            pixels[stage] += share[:, None] * (np.array(shade(*key)) - idle)
    area = (0, end, num_stages, 0)
    axes.imshow(pixels.clip(0, 1), extent=area, aspect="auto", interpolation="nearest", zorder=1)


def _draw_numbers(axes: Axes, outline: TimelineOutline, sizes: _Sizes) -> None:
    """Writes the microbatch into each action that it fits in, in one font size that fits nine of ten."""
    if sizes.row < 0.15:
        return
    labels = [
        (sizes.inches(end - start) - 0.03, (start + end) / 2 / sizes.unit.size_s, stage + 0.52, str(action.microbatch))
        for stage, spans in enumerate(outline.spans)
        for action, start, end in spans
    ]
    fitting = sorted(room / (len(number) * _DIGIT) for room, _, _, number in labels)
    size = min(_FONT, 50 * sizes.row, max(_SMALL_FONT, fitting[len(fitting) // 10]))
    for room, x, y, number in labels:
        if room >= len(number) * _DIGIT * size * 0.999:
            axes.text(x, y, number, ha="center", va="center", fontsize=size, color=INK, clip_on=True)


def _draw_memory(figure: Figure, top: float, outline: TimelineOutline, sizes: _Sizes) -> None:
    """Draws the memory of each stage over time as a line, with the stages' names at the right."""
    axes = _panel(figure, top, _MEMORY, sizes)
    second, end = sizes.unit.size_s, outline.makespan_s / sizes.unit.size_s
    counted = [stage for stage, peak in enumerate(outline.peaks) if peak]
    axes.set_ylim(0, sizes.most_bytes * 1.06)
    axes.set_yticks([0, sizes.most_bytes / 2, sizes.most_bytes])
    axes.set_yticklabels(["0", "", format_bytes(sizes.most_bytes)], fontsize=_FONT)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    width = 1.5 if len(counted) <= 16 else 0.7
    for place, stage in reversed([*enumerate(counted)]):
        held = {min(max(at / second, 0), end): num_bytes for at, num_bytes in outline.memory[stage]}
        times, levels = [*held, end], [*held.values(), outline.memory[stage][-1][1]]
        colour = _line_colour(place, len(counted))
        axes.plot(times, levels, drawstyle="steps-post", linewidth=width, color=colour, clip_on=False)
    _write(figure, LEFT, top + _MEMORY / 2, "memory", 0.75, fontsize=10, color=MUTED)
    for n, place in enumerate(spread(len(counted), _MANY_LINES)):
        at, colour = top + 0.1 + 0.165 * n, _line_colour(place, len(counted))
        _write(figure, _END + 0.12, at, f"stage {counted[place]}", 0.85, fontsize=9, weight="bold", color=colour)


def _line_colour(place: int, count: int) -> tuple[float, ...]:
    """Returns the color of a stage's line, from dark blue for the first to red: not the color of a kind."""
    part = place / max(count - 1, 1)
    return tuple((1 - part) * first + part * last for first, last in zip(_FIRST_LINE, _LAST_LINE, strict=True))


def _draw_legend(figure: Figure, drawn: Sequence[TimelineOutline]) -> None:
    """Draws the color of each kind of action, and a note if stages have several chunks."""
    from matplotlib.patches import Rectangle

    most_chunks = max(outline.most_chunks for outline in drawn)
    entries = [
        (KINDS[kind], [shade(kind, place, most_chunks) for place in spread(most_chunks, 2)])
        for kind in KINDS
        if any(kind in outline.kinds for outline in drawn)
    ]
    left = LEFT
    for word, colours in [*entries, ("idle", [mixed(_IDLE, 1)])] if entries else []:
        for colour in colours:
            corner = left / WIDTH, 1 - 0.98 / figure.get_figheight()
            size = 0.16 / WIDTH, 0.16 / figure.get_figheight()
            figure.add_artist(Rectangle(corner, *size, facecolor=colour, linewidth=0, transform=figure.transFigure))
            left += 0.17
        text = _write(figure, left + 0.06, 0.9, word, 2.0, fontsize=10.5)
        left += _inches(text) + 0.3
    if most_chunks > 1:
        _write(figure, WIDTH - LEFT, 0.9, "lighter: later chunks", 2.0, ha="right", fontsize=10.5, color=MUTED)


def shade(kind: ActionKind, place: int, num_chunks: int) -> tuple[float, ...]:
    """Returns the color of a pipeline action, as (red, green, blue) from 0 to 1: that of its kind of action.

    It is lighter for later chunks: ``place`` is that of the action's chunk among the ``num_chunks`` of the stage.
    """
    return mixed(KIND_COLOURS[kind], 1 - 0.6 * place / max(num_chunks - 1, 1))


def _write(figure: Figure, x: float, y: float, words: str, room: float, least: float = 0.0, **style: Any) -> Text:
    """Writes text at inches from the top left, cut to ``room`` inches; letters that the font lacks become squares.

    With ``least`` the letters become smaller, down to so many points, before the text is cut.
    """
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    shown = "".join(letter if font.get_char_index(ord(letter)) else "\N{WHITE SQUARE}" for letter in words[:200])
    style = {"va": "center", "color": INK, **style}
    text = figure.text(x / WIDTH, 1 - y / figure.get_figheight(), shown, parse_math=False, **style)
    if least and _inches(text) > room:
        text.set_fontsize(max(least, 0.99 * float(text.get_fontsize()) * room / _inches(text)))
    while shown and _inches(text) > room:
        shown = shown[: min(len(shown) - 1, round(len(shown) * room / _inches(text)))]
        text.set_text(f"{shown}\N{HORIZONTAL ELLIPSIS}")
    return text


def _inches(text: Text) -> float:
    return float(text.get_window_extent().width) / DPI if text.get_text() else 0.0
