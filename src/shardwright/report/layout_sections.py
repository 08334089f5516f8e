"""Sections of a page that show a layout: the map of its ranks, their memory and traffic, its pipeline and layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from shardwright.formatting import format_bytes, format_count
from shardwright.report.charts import NUM_COLOURS, Bar, bar_list, shared_names
from shardwright.report.description import STATE_NAMES, STATES, Description, timeline_of
from shardwright.report.outline import (
    Grid,
    Rank,
    RankGroup,
    layer_rows,
    num_grids,
    rank_grids,
    rank_groups,
    shortened,
    slice_letter,
    starred,
)
from shardwright.report.page import details, html_table
from shardwright.report.timeline_page import timeline_group

_MOST_GRIDS, _MOST_COLUMNS, _MOST_ROWS = 4, 8, 8
_MOST_LAYERS = 16


def layout_html(description: Description, peaks: Sequence[int] = ()) -> str:
    """Returns HTML on a layout: a map of its ranks, their state, what they send, the pipeline's timeline, the layers.

    ``peaks`` are the measured peak bytes of each rank.
    """
    parts = [
        f"<h3>Ranks</h3>\n{rank_map(description)}",
        f"<h3>Memory of each rank</h3>\n{memory_html(description, peaks)}",
        *_traffic(description),
        *_timeline(description),
        details("Layers, and how each is parallelized", _layers(description), kind="more"),
    ]
    return "\n".join(parts)


# ---- the map


def rank_map(description: Description) -> str:
    """Returns HTML tables of the ranks on their grid; equal letters, and colors, are equal slices of the parameters."""
    grids, total = rank_grids(description), num_grids(description)
    tables = []
    for index in shortened(total, _MOST_GRIDS):
        if index is None:
            tables.append(f'<p class="note">{total - _MOST_GRIDS + 1:,} more grids like these</p>')
        else:
            tables.append(_grid(grids[min(index, len(grids) - 1)]))
    wide = " wide" * (len(tables) == 1 or grids[0].width > 4)
    note = f'<p class="note">{escape(_map_words(description))}</p>'
    return f'{note}\n<div class="grids{wide}">\n' + "\n".join(tables) + "\n</div>"


def _map_words(description: Description) -> str:
    mesh, size = description["mesh"], description["world_size"]
    ranks = f"{size:,} rank{'s' * (size > 1)}"
    slices = len({rank["slice"] for rank in description["ranks"]})
    if slices == 1:
        held = "each stores all parameters" if size > 1 else "it stores all parameters"
    else:
        held = f"{slices:,} slices of the parameters: ranks of the same letter store the same one"
    axes = ", ".join(f"{axis} {count}" for axis, count in mesh.items() if count > 1)
    return f"{ranks}{f' ({axes})' if axes else ''}; {held}. Below a rank's number: the bytes of its parameters."


def _grid(grid: Grid) -> str:
    columns, rows = shortened(grid.width, _MOST_COLUMNS), shortened(grid.height, _MOST_ROWS)
    names = ("&hellip;" if c is None else escape(f"{grid.columns} {c}") for c in columns)
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    corner = "<td></td>" if grid.rows else ""
    lines = []
    for r in rows:
        name = "&vellip;" if r is None else escape(f"{grid.rows} {r}")
        label = f'<th scope="row">{name}</th>' if grid.rows else ""
        cells = "".join(
            '<td class="gap">&hellip;</td>' if r is None or c is None else _cell(grid.cells.get((r, c)))
            for c in columns
        )
        lines.append(f"<tr>{label}{cells}</tr>")
    caption = f"<caption>{escape(grid.title)}</caption>" if grid.title else ""
    top = f"<thead><tr>{corner}{heads}</tr></thead>\n" if grid.columns else ""
    kind = "ranks many" if len(columns) > 4 else "ranks"
    return f'<table class="{kind}">{caption}\n{top}<tbody>\n' + "\n".join(lines) + "\n</tbody></table>"


def _cell(rank: Rank | None) -> str:
    if rank is None:
        return '<td class="gap"></td>'
    letter, held = slice_letter(rank["slice"]), format_bytes(rank["parameter_bytes"])
    return (
        f'<td class="rank c{rank["slice"] % NUM_COLOURS}"><b><span>{rank["rank"]}</span> <span>{letter}</span></b>'
        f"<small>{held}</small></td>"
    )


# ---- memory


def memory_html(description: Description, peaks: Sequence[int]) -> str:
    """Returns bars of the state that ranks store, and a table that has the measured peaks beside it."""
    measured = len(peaks) == description["world_size"]
    groups = rank_groups(description)
    bars = []
    for group in groups:
        parts = {STATE_NAMES[state]: group.ranks[0][state] for state in STATES}
        bars.append(Bar(group.name, parts, format_bytes(sum(parts.values()))))
    heads, body = ["ranks", "parameters", "gradients", "optimizer", "state, predicted"], []
    for group in groups:
        states = [group.ranks[0][state] for state in STATES]
        cells = [escape(group.name), *map(format_bytes, (*states, sum(states)))]
        body.append([*cells, *([_measured(group, peaks)] if measured else [])])
    note = "State is parameters, gradients and the two moments of AdamW, as the layout shards them."
    if "offloaded_bytes" in description["ranks"][0]:
        note += " State that is offloaded to host memory or disk is not counted."
    if measured:
        heads.append("peak, measured")
        note += " The measured peak also counts activations, buffers and all else in the rank's process or device."
    table = html_table(heads, body, numbers_from=1, stacked=True)
    return f'<p class="note">{escape(note)}</p>\n{bar_list(bars, list(STATE_NAMES.values()))}\n' + details(
        "As a table", table, is_open=measured and len(groups) <= 8, kind="more"
    )


def _measured(group: RankGroup, peaks: Sequence[int]) -> str:
    """Returns the range of measured peaks in a group of ranks."""
    sizes = [peaks[rank["rank"]] for rank in group.ranks]
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return high if low == high else f"{low} to {high}"


# ---- traffic


def _traffic(description: Description) -> Iterator[str]:
    if "layer_traffic" not in description:
        return
    groups = [group for group in rank_groups(description) if "sent_bytes" in group.ranks[0]]
    sent = [{_words(name): size for name, size in group.ranks[0]["sent_bytes"].items()} for group in groups]
    names = shared_names(sent)
    if not names:
        yield '<h3>Sent in a step</h3>\n<p class="note">Nothing: no strategy of this layout sends.</p>'
        return
    bars = [
        Bar(group.name, parts, format_bytes(sum(parts.values()))) for group, parts in zip(groups, sent, strict=True)
    ]
    most = max(sent, key=lambda parts: sum(parts.values()))
    first = max(most, key=lambda name: most[name])
    note = f"By strategy, predicted. Most is sent by {first}: {format_bytes(most[first])} of one rank's "
    note += f"{format_bytes(sum(most.values()))}."
    yield f'<h3>Sent in a step</h3>\n<p class="note">{escape(note)}</p>\n{bar_list(bars, names)}'
    yield _layer_traffic(description["layer_traffic"], names)


def _layer_traffic(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Returns bars of the bytes sent for each layer; layers that differ only in their block's number share a bar."""
    counts: dict[tuple[str, tuple[tuple[str, float], ...]], int] = Counter()
    by_layer: dict[str, dict[str, float]] = {}
    for entry in entries:
        by_layer.setdefault(entry["layer"], {})[_words(entry["strategy"])] = entry["sent_bytes"]
    labels: dict[tuple[str, tuple[tuple[str, float], ...]], list[str]] = {}
    for layer, parts in by_layer.items():
        key = (starred(layer), tuple(sorted(parts.items())))
        counts[key] += 1
        labels.setdefault(key, []).append(layer)
    ordered = sorted(counts, key=lambda key: -sum(size for _, size in key[1]) * counts[key])
    bars = []
    for key in ordered[:_MOST_LAYERS]:
        name, num = labels[key][0] if counts[key] == 1 else key[0], counts[key]
        parts = {strategy: size * num for strategy, size in key[1]}
        layer_size = sum(size for _, size in key[1])
        times = f"\N{MULTIPLICATION SIGN}{num}, {format_bytes(layer_size)} each" if num > 1 else ""
        bars.append(Bar(name or "outside of layers", parts, format_bytes(layer_size * num), times))
    other_keys = ordered[_MOST_LAYERS:]
    if other_keys:
        parts = {}
        for key in other_keys:
            for strategy, size in key[1]:
                parts[strategy] = parts.get(strategy, 0.0) + size * counts[key]
        bars.append(Bar(f"{sum(counts[key] for key in other_keys):,} others", parts, format_bytes(sum(parts.values()))))
    note = "Of each layer, on the rank that sends most for it. a..b are the blocks from a to b, whose gradients, or "
    note += "parameters, are sent as one."
    return f'<h3>Sent in a step for each layer</h3>\n<p class="note">{escape(note)}</p>\n{bar_list(bars, names)}'


def _words(strategy: str) -> str:
    return strategy.replace("_", " ")


# ---- the rest


def _timeline(description: Description) -> Iterator[str]:
    timeline = timeline_of(description)
    if timeline is None:
        return
    speed = (
        f"at {description['seconds_from']}"
        if "guess" in description["seconds_from"]
        else f"from {description['seconds_from']}"
    )
    note = f"Schedule {description['schedule']}, predicted {speed}; bubble {100 * description['bubble']:.1f} %."
    yield f'<h3>Pipeline</h3>\n<p class="note">{escape(note)}</p>\n{timeline_group([timeline])}'


def _layers(description: Description) -> str:
    body = []
    for row in layer_rows(description):
        times = f' <span class="times">&times;{row.num_layers}</span>' if row.num_layers > 1 else ""
        role = f'<span class="nowrap {"copied" * (row.role == "copied")}">{escape(row.role)}</span>'
        shapes = "<br>".join(f"<code>{escape(shape)}</code>" for shape in row.shapes)
        shapes = shapes.replace("-&gt;", "\N{RIGHTWARDS ARROW}")
        body.append([f"<code>{escape(row.module)}</code>{times}", role, escape(row.why), shapes])
    heads = ["layer", "what was done", "why", "parameters, whole \N{RIGHTWARDS ARROW} on each rank"]
    return html_table(heads, body, stacked=True)


def layout_words(description: Description) -> str:
    """Returns the size of a layout in words, such as "4 ranks, 132.9 k parameters"."""
    size = description["world_size"]
    return f"{size:,} rank{'s' * (size > 1)}, {format_count(description['num_parameters'])} parameters"
