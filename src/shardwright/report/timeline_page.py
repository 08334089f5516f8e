"""Writes pipeline timelines as an HTML page that a script makes interactive, followed by the timelines as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwright.formatting import format_bytes
from shardwright.report.page import data_element, details, html_table, section, write_html
from shardwright.report.timeline_outline import (
    KINDS,
    NOTHING,
    TimelineOutline,
    digits_of,
    outlines,
    percent,
    precise_time,
    spread,
    times_as_long,
)
from shardwright.report.timeline_picture import KIND_COLOURS, shade
from shardwright.report.timeline_text import timeline_text
from shardwright.runtime.timeline import Timeline

_KEYS = (
    "Hover for details; the wheel zooms, dragging pans, a double click shows all of it. "
    "Keys: arrows from action to action, + and - zoom, 0 shows all of it."
)


def write_timeline_page(path: Path, timelines: Sequence[Timeline], title: str = "Timeline") -> Path:
    """Writes an interactive HTML page of pipeline timelines, one below the other on one time axis. Returns the path.

    The file opens without a network and follows the reader's light or dark setting. An action that is in two timelines
    is marked in both, and its durations are compared. A table of the stages and the drawing as text follow, for readers
    without JavaScript or without sight.
    """
    drawn = outlines(timelines)
    under = filter(None, (_counts(drawn), times_as_long(drawn)))
    panels = "\n".join(f"<section>\n{_panel(place, outline)}</section>" for place, outline in enumerate(drawn))
    sections = [
        _group(drawn, panels) if drawn else section("No timeline", f"<p>{NOTHING}</p>"),
        _stage_table(drawn),
        f"<section>\n{details('As text', _as_text(timelines))}\n</section>",
    ]
    return write_html(
        path, title=title, under=escape("; ".join(under)), sections=sections, parts=("timeline",), wide=True
    )


def timeline_group(timelines: Sequence[Timeline]) -> str:
    """Returns the HTML of pipeline timelines inside of another page, on one time axis, with the drawing as text.

    The page needs the part "timeline".
    """
    drawn = outlines(timelines)
    panels = "\n".join(_panel(place, outline, "h4") for place, outline in enumerate(drawn))
    text = details("The pipeline as text", _as_text(timelines), kind="more")
    return f'{_group(drawn, panels)}\n<p class="note">{escape(_KEYS)}</p>\n{text}'


def _group(drawn: Sequence[TimelineOutline], panels: str) -> str:
    """Returns the HTML of panels that the script draws on one time axis, with their legend and their data."""
    bar = _bar(drawn) if any(outline.makespan_s for outline in drawn) else ""
    return f'<div class="timelines">\n{bar}\n{panels}\n{data_element(_data(drawn))}</div>'


def _as_text(timelines: Sequence[Timeline]) -> str:
    return f'<pre class="drawing" tabindex="0">{escape(timeline_text(timelines, width=130))}</pre>'


def _counts(drawn: Sequence[TimelineOutline]) -> str:
    """Returns the number of stages, microbatches and actions in words; "" if the timelines differ in them."""
    sizes = {(len(outline.spans), outline.num_microbatches, outline.num_spans) for outline in drawn}
    if len(sizes) != 1:
        return ""
    stages, microbatches, actions = sizes.pop()
    counts = ((stages, "stage", "s"), (microbatches, "microbatch", "es"), (actions, "action", "s"))
    return ", ".join(f"{count:,} {word}{ending * (count != 1)}" for count, word, ending in counts)


def _bar(drawn: Sequence[TimelineOutline]) -> str:
    """Returns the HTML of the legend and the zoom buttons."""
    most_chunks = max(outline.most_chunks for outline in drawn)
    keys = []
    for kind, words in KINDS.items():
        if any(kind in outline.kinds for outline in drawn):
            shades = [_css(shade(kind, place, most_chunks)) for place in spread(most_chunks, 2)]
            swatches = "".join(f'<span class="swatch" style="background:{colour}"></span>' for colour in shades)
            keys.append(f'<span class="key">{swatches}{escape(words)}</span>')
    keys.append('<span class="key"><span class="swatch" style="background:var(--idle)"></span>idle</span>')
    if most_chunks > 1:
        keys.append('<span class="key note">lighter: later chunks</span>')
    tools = (("in", "zoom in", "+"), ("out", "zoom out", "&minus;"), ("whole", "show all of it", "all"))
    buttons = "".join(
        f'<button type="button" data-tool="{tool}" aria-label="{words}">{face}</button>' for tool, words, face in tools
    )
    return f'<div class="bar">{"".join(keys)}<span class="tools">{buttons}</span></div>'


def _css(colour: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def _panel(place: int, outline: TimelineOutline, tag: str = "h2") -> str:
    if not outline.makespan_s:
        return f"<{tag}>{escape(outline.name)}</{tag}>\n<p>{NOTHING}</p>"
    label = f"{outline.name}: {outline.summary}, on {len(outline.spans)} stages. {_KEYS}"
    return (
        f'<div class="head"><{tag}>{escape(outline.name)}</{tag}><span>{escape(outline.summary)}</span></div>\n'
        f'<div class="panel" data-timeline="{place}"><canvas tabindex="0" role="application" '
        f'aria-label="{escape(label)}"></canvas><i class="cursor"></i><i class="mark"></i></div>\n'
        "<noscript><p>The drawing needs JavaScript; below is the same as text.</p></noscript>\n"
    )


def _stage_table(drawn: Sequence[TimelineOutline]) -> str:
    """Returns a table of the computing time, bubble and peak memory of each stage, in every timeline."""
    shown = [outline for outline in drawn if outline.makespan_s]
    if not shown:
        return ""
    heads, several = ["stage"], len(shown) > 1
    for outline in shown:
        names = ("computes", "bubble", *(["peak memory"] if any(outline.peaks) else []))
        heads += [f"{outline.name}: {name}" if several else name for name in names]
    body = []
    for stage in range(max(len(outline.spans) for outline in shown)):
        cells = [str(stage)]
        for outline in shown:
            counted = any(outline.peaks)
            if stage >= len(outline.spans):
                cells += [""] * (2 + counted)
                continue
            bubble = outline.bubbles[stage]
            cells += [precise_time((1 - bubble) * outline.makespan_s), percent(bubble)]
            cells += [format_bytes(outline.peaks[stage])] if counted else []
        body.append(cells)
    table = html_table(heads, body, numbers_from=1)
    return (
        f'<p class="note">{escape(_KEYS)}</p>\n<section>\n'
        f"{details('Stages', table, is_open=len(body) <= 16)}\n</section>"
    )


def _data(drawn: Sequence[TimelineOutline]) -> dict[str, Any]:
    """Returns the script's data: for each stage, five numbers an action and two a change of memory."""
    end = max((outline.makespan_s for outline in drawn), default=0.0)
    digits = digits_of(end)
    kinds = [*KINDS]
    timelines = [
        {
            "name": outline.name,
            "makespan": outline.makespan_s,
            "most": max(outline.peaks, default=0),
            "stages": [
                {
                    "chunks": [*outline.chunks[stage]],
                    "spans": [
                        number
                        for (kind, microbatch, chunk), *times in spans
                        for number in (kinds.index(kind), microbatch, chunk, *(round(time, digits) for time in times))
                    ],
                    "memory": [number for change in outline.memory[stage] for number in change]
                    if outline.memory
                    else [],
                }
                for stage, spans in enumerate(outline.spans)
            ],
        }
        for outline in drawn
    ]
    data: dict[str, Any] = {"end": end, "kinds": [(kind, KINDS[kind], KIND_COLOURS[kind]) for kind in kinds]}
    return data | {"timelines": timelines}
