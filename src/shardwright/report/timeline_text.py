"""Draws pipeline timelines as text for a terminal: a row for each stage, in which a character is a span of time.

::

    stage 0 |F0F1      B0==  B1==|   kind, microbatch, and a fill as long as the action takes
    stage 1 |  F0B0==F1B1==      |   a blank: the stage is idle
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import groupby
from textwrap import wrap
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from shardwright.formatting import format_bytes
from shardwright.plan.schedule import Action, ActionKind
from shardwright.report.timeline_outline import (
    KINDS,
    TimelineOutline,
    outlines,
    percent,
    precise_time,
    spread,
    ticks,
    time_unit,
    times_as_long,
)
from shardwright.runtime.timeline import Span, Timeline

_FILLS: dict[ActionKind, str] = {"F": "-", "B": "=", "I": "~", "W": "."}
_STYLES: dict[ActionKind, str] = {
    "F": "black on cyan",
    "B": "black on yellow",
    "I": "black on magenta",
    "W": "black on green",
}
_MOST_STAGES = 16
_FEWEST_CELLS = 10
_LONG_NAME = 60


class _CellScale(NamedTuple):
    """The time of a cell, and the number of cells in a row."""

    cell_s: float
    num_cells: int


def timeline_text(timelines: Sequence[Timeline], width: int = 100, colour: bool = False) -> str:
    """Returns pipeline timelines as text for a terminal of ``width`` characters, one below the other on one time axis.

    An action shows its kind and, if they fit, its microbatch and a fill; a blank is idle time. Each row ends with the
    stage's bubble and, if it is known, its peak memory. At most 16 stages are drawn; the text says so, and how many
    actions are too short to be seen. Below about 40 characters, rows are longer than ``width``. ``colour`` adds ANSI
    codes.

    >>> F, B = Action("F", 0), Action("B", 0)
    >>> timeline = Timeline("two stages", ((Span(F, 0, 1), Span(B, 4, 6)), (Span(F, 1, 2), Span(B, 2, 4))))
    >>> print(timeline_text([timeline], width=40))
    two stages: makespan 6.00 s, bubble 50.0 %
                                 bubble
    stage 0 |F0-         B0====| 50.0 %
    stage 1 |   F0-B0====      | 50.0 %
             0     2     4     6 s
    <BLANKLINE>
    F forward, B backward, blank idle. The
    number is the microbatch.
    """
    drawn = outlines(timelines)
    name_width = max((len(f"stage {len(outline.spans) - 1}") for outline in drawn), default=0)
    right = max((len(_row_end(outline, 0)) for outline in drawn if outline.spans), default=0)
    scale = _scale(drawn, max(_FEWEST_CELLS, width - name_width - 3 - right))
    lines = [line for outline in drawn for line in (*_drawing(outline, scale, name_width), Text())]
    notes = [*_legend(drawn), *_left_out(drawn, scale), times_as_long(drawn)]
    lines += [Text(line) for note in notes if note for line in wrap(_printable(note), max(width, 20))]
    return _written(lines, colour)


def _drawing(outline: TimelineOutline, scale: _CellScale, name_width: int) -> Iterator[Text]:
    """Yields the lines of one timeline: its summary, the heads, a row for each stage, the axis of time."""
    name = outline.name if len(outline.name) <= _LONG_NAME else f"{outline.name[: _LONG_NAME - 3]}..."
    yield Text(_printable(f"{name}: {outline.summary}"), style="bold")
    if not outline.makespan_s:
        return
    heads = "  bubble" + "peak".rjust(len(_row_end(outline, 0)) - 8) * any(outline.peaks)
    yield Text(" " * (name_width + scale.num_cells + 3) + heads, style="dim")
    for stage in spread(len(outline.spans), _MOST_STAGES):
        row, chunks = Text(f"{f'stage {stage}':{name_width}} |"), outline.chunks[stage]
        for action, text in stage_runs(outline, stage, scale):
            row.append(text, style=_STYLES[action.kind] + " dim" * (chunks[action.chunk] % 2) if action else "")
        yield row.append(f"|{_row_end(outline, stage)}")
    yield Text(" " * (name_width + 2) + _axis(scale), style="dim")


def _row_end(outline: TimelineOutline, stage: int) -> str:
    """Returns the text behind a stage's row: its bubble and its peak."""
    peak = f" {format_bytes(outline.peaks[stage]):>10}" if any(outline.peaks) else ""
    return f" {percent(outline.bubbles[stage]):>7}{peak}"


def _scale(drawn: Sequence[TimelineOutline], most_cells: int) -> _CellScale:
    """Returns the scale that fits all timelines into ``most_cells``, or up to a quarter fewer for whole cells."""
    longest = max((outline.makespan_s for outline in drawn), default=0.0)
    lengths = [end - start for outline in drawn for stage in outline.spans for _, start, end in stage if end > start]
    if not longest or not lengths:
        return _CellScale(0.0, 0)
    shortest = min(lengths)
    whole = int(most_cells * shortest / longest + 1e-9)  # cells of the shortest action
    num_cells = round(whole * longest / shortest)
    if num_cells >= 0.75 * most_cells:
        return _CellScale(shortest / whole, num_cells)
    return _CellScale(longest / most_cells, most_cells)


def stage_runs(outline: TimelineOutline, stage: int, scale: _CellScale) -> Iterator[tuple[Action | None, str]]:
    """Yields (action, text that shows it) for the row of a stage, from left to right; for idle time the action is None.

    ``scale`` has the seconds that one character of the row stands for, and the number of characters. Actions that cover
    the middle of no character are left out.
    """
    spans, chunks = outline.spans[stage], outline.chunks[stage]
    at, doing = 0, list[Span | None]()
    for cell in range(scale.num_cells):
        middle = (cell + 0.5) * scale.cell_s
        while at < len(spans) and spans[at].end_s <= middle:
            at += 1
        doing.append(spans[at] if at < len(spans) and spans[at].start_s <= middle else None)
    for span, cells in groupby(doing):
        size = len(list(cells))
        yield (span.action, _label(span.action, chunks, size)) if span else (None, " " * size)


def _label(action: Action, chunks: dict[int, int], size: int) -> str:
    """Returns the label of an action in ``size`` cells: a microbatch number that does not fit is left out."""
    kind = action.kind if chunks[action.chunk] % 2 == 0 else action.kind.lower()
    label = next(text for text in (f"{kind}{action.microbatch}", kind) if len(text) <= max(size, 1))
    return label.ljust(size, _FILLS[action.kind])


def _axis(scale: _CellScale) -> str:
    """Returns the line of the time axis: round times, each below the cell at which it begins."""
    end = scale.cell_s * scale.num_cells
    unit, line = time_unit(end), ""
    for tick in ticks(end / unit.size_s, max(4, scale.num_cells // 8)):
        line = line.ljust(round(tick * unit.size_s / scale.cell_s)) + f"{tick:g}"
    return f"{line} {unit.name}"


def _legend(drawn: Sequence[TimelineOutline]) -> Iterator[str]:
    kinds = [kind for kind in KINDS if any(kind in outline.kinds for outline in drawn)]
    if kinds:
        names = ", ".join(f"{kind} {KINDS[kind]}" for kind in kinds)
        yield f"{names}, blank idle. The number is the microbatch."
    most_chunks = max((outline.most_chunks for outline in drawn), default=0)
    if most_chunks > 1:
        yield f"Upper case is a stage's first chunk, lower case {'its' if most_chunks == 2 else 'every'} second."


def _left_out(drawn: Sequence[TimelineOutline], scale: _CellScale) -> Iterator[str]:
    """Yields sentences about the stages and actions that the drawing does not show."""
    for outline in drawn:
        stages, name = spread(len(outline.spans), _MOST_STAGES), f"{outline.name}: " * (len(drawn) > 1)
        if not outline.makespan_s:
            continue
        if len(stages) < len(outline.spans):
            low, high = percent(min(outline.bubbles)), percent(max(outline.bubbles))
            yield (
                f"{name}{len(stages)} of {len(outline.spans):,} stages are drawn, evenly spaced; "
                f"the bubbles of all are {low} to {high}."
            )
        shown = sum(action is not None for stage in stages for action, _ in stage_runs(outline, stage, scale))
        total = sum(len(outline.spans[stage]) for stage in stages)
        if shown < total:
            yield (
                f"{name}{total - shown:,} of the {total:,} actions in these rows, with {outline.num_microbatches:,} "
                f"microbatches, are left out: a cell, {precise_time(scale.cell_s)}, shows one."
            )


def _printable(text: str) -> str:
    """Returns text with line breaks and control codes, which a terminal would obey, replaced by question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _written(lines: Iterable[Text], colour: bool) -> str:
    out = StringIO()
    system: Literal["standard"] | None = "standard" if colour else None
    console = Console(
        file=out, force_terminal=colour, color_system=system, width=10_000, force_jupyter=False, _environ={}
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    return out.getvalue().rstrip("\n") if colour else "\n".join(map(str.rstrip, out.getvalue().splitlines())).rstrip()
