"""Draws a layout's description as text for ``shardwright show``: its ranks, layers, memory and traffic.

::

    dp2 tp2          tp 0    tp 1        equal letters: equal slices of the parameters
             dp 0    0 A     1 B         dp copies, tp cuts
             dp 1    2 A     3 B
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwright.formatting import format_bytes, format_count
from shardwright.mesh import Mesh
from shardwright.report.description import STATES, Description, timeline_of
from shardwright.report.outline import Rank, layer_rows, num_grids, rank_grids, rank_groups, shortened, slice_letter
from shardwright.report.timeline_text import timeline_text
from shardwright.sharding.words import numbers


def show_text(description: Description, width: int = 100) -> str:
    """Returns a layout's description as text for a terminal of ``width`` characters, as ``shardwright show`` prints it.

    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> from shardwright.report.description import describe
    >>> job = Job(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Identity())
    >>> print(show_text(describe(job, Layout.parse("dp2 tp2")), width=72).partition("slice of")[0])
    dp2 tp2: 4 ranks, 76 parameters
    <BLANKLINE>
             tp 0   tp 1
      dp 0   0 A    1 B
      dp 1   2 A    3 B
    The same letter: the same
    """
    ranks = f"{description['world_size']:,} rank{'s' * (description['world_size'] > 1)}"
    title = f"{description['layout']}: {ranks}, {format_count(description['num_parameters'])} parameters"
    cut = [fill(("warning: " * share["is_low"]) + share["text"], width) for share in description["shares"]]
    cut += [fill(f"warning: {text}", width) for text in description.get("nodes", {}).get("warnings", ())]
    tables = [*_node_table(description), *_stage_table(description), _memory_table(description)]
    if "samples" in description["ranks"][0]:
        tables.append(_traffic_table(description))
    drawn = [] if (timeline := timeline_of(description)) is None else [timeline_text([timeline], width)]
    drawn += [f"The prediction's seconds are from {description['seconds_from']}."] if drawn else []
    texts = (table_text(table, width) for table in tables)
    layers = table_text(_layer_table(description), width)
    return "\n".join([title, *_grid_texts(description, width), layers, *cut, *[""] * bool(cut), *texts, *drawn])


def _grid_texts(description: Description, width: int) -> Iterable[str]:
    """Yields the lines of the grids of ranks; of many grids, rows or columns only the first ones and the last."""
    grids, total = rank_grids(description), num_grids(description)
    for index in shortened(total, 4):
        yield ""
        if index is None:
            yield f"  ... {total - 3:,} more grids ..."
            continue
        grid = grids[min(index, len(grids) - 1)]
        columns, rows = shortened(grid.width, max(3, min(10, width // 10))), shortened(grid.height, 8)
        lines = [[grid.title, *("" if c is None else f"{grid.columns} {c}" for c in columns)]] if grid.columns else []
        for r in rows:
            label = "" if r is None or not grid.rows else f"{grid.rows} {r}"
            lines.append([label, *("..." if r is None or c is None else _cell(grid.cells[r, c]) for c in columns)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = [f"{text:{w}}" for text, w in zip(line, widths, strict=True) if w]
            yield "  " + "   ".join(cells).rstrip()
    yield "The same letter: the same slice of the parameters.\n" if description["mesh"] else ""


def _cell(rank: Rank) -> str:
    return f"{rank['rank']} {slice_letter(rank['slice'])}"


def _layer_table(description: Description) -> Table:
    table = table_of("layers", "what was done", "why", "parameters, whole -> on each rank")
    for row in layer_rows(description):
        count = f" x{row.num_layers}" if row.num_layers > 1 else ""
        table.add_row(*map(Text, (row.module + count, row.role, row.why, "\n".join(row.shapes))))
    return table


def _stage_table(description: Description) -> Iterable[Table]:
    """Yields a table of each pipeline stage's layers and its shares of time and memory; nothing without a pipeline."""
    if "stages" not in description:
        return
    table = table_of("stages", "layers", "share of time", "parameters", "activations of a microbatch")
    for stage in description["stages"]:
        several, kept = len(stage["chunks"]) > 1, stage["activation_bytes"]
        layers = [f"{chunk['chunk']}: " * several + _calls(chunk["calls"]) for chunk in stage["chunks"]]
        layers += [f"larger than its share: {stage['why_large']}"] if "why_large" in stage else []
        numbers = [f"{stage['share_of_time']:.1%}", format_bytes(stage["parameter_bytes"])]
        table.add_row(f"stage {stage['stage']}", "\n".join(layers), *numbers, format_bytes(kept) if kept else "")
    if "scattered_over" in description:
        axis = description["scattered_over"]
        table.add_row("between", f"of what they hold alike, ranks of {axis} send a part each, all-gathered on arrival")
    yield table


def _node_table(description: Description) -> Iterable[Table]:
    """Yields a table of the nodes, the indices of their ranks on each axis, and what each axis sends between nodes."""
    if "nodes" not in description:
        return
    nodes, mesh = description["nodes"], Mesh(**description["mesh"])
    table = table_of("nodes", "ranks", *mesh.axes)
    for node in shortened(nodes["num_nodes"], 8):
        if node is None:
            table.add_row("...")
            continue
        first = node * nodes["ranks_per_node"]
        coords = [mesh.coord(rank) for rank in range(first, first + nodes["ranks_per_node"])]
        indices = (numbers(sorted({coord[axis] for coord in coords})) for axis in mesh.axes)
        table.add_row(f"node {node}", f"{first} to {first + nodes['ranks_per_node'] - 1}", *indices)
    words = ("crosses" if entry["crosses"] else "inside" for entry in nodes["axes"].values())
    table.add_row("between nodes", "", *words)
    if all("between_bytes" in entry for entry in nodes["axes"].values()):
        table.add_row("sent there in a step", "", *(format_bytes(e["between_bytes"]) for e in nodes["axes"].values()))
    yield table


def _calls(names: Sequence[str]) -> str:
    """Returns the names in order; of a long list the first three and the last two."""
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, ... {', '.join(names[-2:])}"


def _memory_table(description: Description) -> Table:
    more = ["offloaded"] if "offloaded_bytes" in description["ranks"][0] else []
    table = table_of("memory", "parameters", "their bytes", "gradients", "AdamW", "sum", *more, numbers=True)
    for name, group in rank_groups(description):
        states = [group[0][state] for state in STATES]
        count = format_count(group[0]["num_parameters"])
        offloaded = [group[0]["offloaded_bytes"]] if more else []
        table.add_row(name, count, *map(format_bytes, (*states, sum(states), *offloaded)))
    return table


def _traffic_table(description: Description) -> Table:
    names = [strategy["name"] for strategy in description["strategies"]]
    table = table_of("sent in a step", "samples", *(name.replace("_", " ") for name in names), numbers=True)
    for name, group in rank_groups(description):
        sent = group[0]["sent_bytes"]
        table.add_row(name, _samples(group[0]), *(format_bytes(sent[strategy]) for strategy in names))
    return table


def _samples(rank: Rank) -> str:
    """Returns how many samples a rank has, and how many tokens of each if sequences are cut."""
    tokens = rank.get("tokens_of_each")
    return str(rank["samples"]) if tokens is None else f"{rank['samples']}, {tokens} tokens of each"


def table_of(*heads: str, numbers: bool = False) -> Table:
    """Returns an empty table (of rich) with these column heads; ``numbers`` aligns all columns but the first right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for position, head in enumerate(heads):
        table.add_column(head, overflow="fold", justify="right" if numbers and position > 0 else "left")
    return table


def table_text(table: Table, width: int) -> str:
    """Returns a rich table as plain text of at most ``width`` characters a line."""
    out = StringIO()

    Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
