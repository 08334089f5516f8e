"""Charts of an HTML page: curves by step, which a script draws and makes interactive, and bars, which need no script.

Each chart has a sentence that says what is seen, and a table of some of its values, for readers without JavaScript or
without sight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Literal, NamedTuple

from shardwright.formatting import format_bytes, format_count, format_duration
from shardwright.report.curves import Curve, MemoryMap, is_log, number, samples_of
from shardwright.report.page import data_element, details, html_table, section

Unit = Literal["bytes", "count", "plain", "ms"]

NUM_COLOURS = 8
"""The number of colors of the style sheet, ``c0`` to ``c7``; later curves begin again with the first."""


class Chart(NamedTuple):
    """A chart of curves by step: its id and heading, a sentence that says what is seen, the unit of its values.

    ``marks`` are steps to mark, with words. ``level`` is a value to mark, with words. ``is_zero_based`` says that the
    axis begins at zero. ``is_compared`` says that the curves are of several runs: they are drawn so that all are seen
    where they are equal. ``is_wide`` gives the chart the page's whole width.
    """

    name: str
    heading: str
    seen: str
    unit: Unit
    curves: Sequence[Curve]
    marks: Sequence[tuple[int, str]] = ()
    level: tuple[float, str] | None = None
    is_zero_based: bool = False
    is_compared: bool = False
    is_wide: bool = False


def chart_section(chart: Chart) -> str:
    """Returns the HTML section of a chart; of a chart without any point it has the sentence alone."""
    coloured = [(n, curve) for n, curve in enumerate(chart.curves) if curve.steps]  # the colors are those of all charts
    curves = [curve for _, curve in coloured]
    kind = "whole" if chart.is_wide else ""
    if not curves:
        return section(chart.heading, "", chart.seen, name=chart.name, kind=kind)
    first = min(curve.steps[0] for curve in curves)
    last = max(curve.steps[-1] for curve in curves)
    values = [value for curve in curves for value in (*curve.values, *curve.low, *curve.high) if value is not None]
    data = {
        "unit": chart.unit,
        "log": not chart.is_zero_based and is_log(values),
        "zero": chart.is_zero_based,
        "compared": chart.is_compared,
        "marks": list(chart.marks),
        "level": chart.level,
        "curves": [{**curve._asdict(), "colour": n} for n, curve in coloured],
    }
    label = f"{chart.heading}, by step. The arrow keys move from step to step."
    drawn = (
        f'<div class="chart" tabindex="0" role="slider" aria-label="{escape(label)}" aria-valuemin="{first}" '
        f'aria-valuemax="{last}" aria-valuenow="{last}" aria-valuetext="{escape(chart.seen)}"><svg></svg></div>'
    )
    note = " The axis is logarithmic." if data["log"] else ""
    thinned = max((len(curve.low) for curve in curves), default=0)
    if thinned:
        note += " A point is the mean of several steps, and the band their lowest and highest."
    return section(
        chart.heading,
        f'<figure class="of-chart">\n<figcaption>{escape(chart.seen)}{note}</figcaption>\n{_legend(coloured)}{drawn}\n'
        f"{data_element(data)}\n</figure>\n{details('Some of the values', _values(chart, curves), kind='more')}",
        name=chart.name,
        kind=kind,
    )


def _legend(coloured: Sequence[tuple[int, Curve]]) -> str:
    """Returns the HTML of buttons, named by the curves, that hide and show them; "" for one curve."""
    if len(coloured) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true"><span class="swatch c{n % NUM_COLOURS} {curve.style}"></span>'
        f"{escape(curve.name)}</button>"
        for n, curve in coloured
    )
    return f'<div class="legend" role="group" aria-label="curves">{buttons}</div>\n'


def _values(chart: Chart, curves: Sequence[Curve]) -> str:
    steps, columns = samples_of(curves)
    body = [
        [f"{step:,}", *(spelled(column[step], chart.unit) if step in column else "" for column in columns)]
        for step in steps
    ]
    return html_table(["step", *(curve.name for curve in curves)], body, numbers_from=1)


def spelled(value: float, unit: Unit) -> str:
    """Returns a value of a chart as text.

    >>> spelled(2048, "bytes"), spelled(12_345, "count"), spelled(41.5, "ms"), spelled(2.5, "plain")
    ('2.0 KiB', '12.3 k', '42 ms', '2.5')
    """
    if unit == "bytes":
        return format_bytes(value)
    if unit == "ms":
        return format_duration(value / 1000)
    return format_count(value) if unit == "count" else number(value)


def map_section(memory: MemoryMap, word: str) -> str:
    """Returns the HTML section of a map of memory: a line of shades for each rank, a column for each few steps.

    ``word`` says which memory it is, "held" or "peak".
    """
    heading = f"Memory {'held' if word == 'held' else 'at the peak so far'} by each rank"
    least, most = format_bytes(memory.least_bytes), format_bytes(memory.most_bytes)
    last = [line[-1] for line in memory.cells]
    fullest = max(range(len(last)), key=lambda rank: last[rank]) * memory.ranks_in_line
    lines = f", {memory.ranks_in_line} in a line" if memory.ranks_in_line > 1 else ""
    seen = f"{memory.num_ranks:,} ranks from top to bottom{lines}, steps from left to right: {least} to {most}."
    seen += f" After the last step, rank {fullest} is among those that hold most."
    label = f"{heading}. The arrow keys move from rank to rank and from step to step."
    return section(
        heading,
        f'<figure class="of-map">\n<figcaption>{escape(seen)}</figcaption>\n<div class="map" tabindex="0" '
        f'role="slider" aria-label="{escape(label)}" aria-valuemin="{memory.steps[0]}" '
        f'aria-valuemax="{memory.steps[-1]}" aria-valuenow="{memory.steps[-1]}" aria-valuetext="{escape(seen)}">'
        "<canvas></canvas><i></i></div>\n"
        f'<p class="scale">{least} <i></i> {most}</p>\n{data_element(memory._asdict())}\n</figure>',
        name="memory-map",
        kind="whole",
    )


# ---- bars


class Bar(NamedTuple):
    """A bar of a list: its name, the sizes of its parts by their name, and the text at its end."""

    name: str
    parts: Mapping[str, float]
    text: str
    times: str = ""


def bar_list(bars: Iterable[Bar], names: Sequence[str], *, most: float | None = None) -> str:
    """Returns HTML of horizontal bars with a common scale, and a legend of their parts, which are called ``names``.

    The longest bar has the full length, or one of size ``most`` if that is given.
    """
    listed = list(bars)
    full = most or max((sum(bar.parts.values()) for bar in listed), default=0) or 1
    keys = "".join(
        f'<span><span class="swatch c{n % NUM_COLOURS}"></span>{escape(name)}</span>' for n, name in enumerate(names)
    )
    lines = []
    for bar in listed:
        pieces = "".join(
            f'<i class="c{names.index(name) % NUM_COLOURS}" style="width:{100 * size / full:.2f}%"></i>'
            for name, size in bar.parts.items()
            if size
        )
        times = f' <span class="times">{escape(bar.times)}</span>' if bar.times else ""
        lines.append(
            f'<li><span class="name">{escape(bar.name)}{times}</span><span class="track" aria-hidden="true">{pieces}'
            f'</span><span class="value">{escape(bar.text)}</span></li>'
        )
    legend = f'<div class="keys">{keys}</div>\n' if len(names) > 1 else ""
    return f'{legend}<ul class="bars">\n' + "\n".join(lines) + "\n</ul>"


def shared_names(bars: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the names of all parts of bars, in the order in which they first occur."""
    return list(dict.fromkeys(name for bar in bars for name, size in bar.items() if size))
