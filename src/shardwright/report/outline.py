"""Condenses a layout's description to fit a page: grids of ranks, groups of equal ranks, rows of equal layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from shardwright.report.description import STATES, Description
from shardwright.sharding.words import numbers

Rank: TypeAlias = Mapping[str, Any]
LayerEntry: TypeAlias = Mapping[str, Any]

MANY_RANKS = 16
"""The number of ranks above which ranks that store and send the same are listed as one group."""


class Grid(NamedTuple):
    """A 2-D grid of ranks along the last two axes of the mesh, whose names are ``rows`` and ``columns``.

    ``height`` and ``width`` are the sizes of these axes, and ``title`` names the indices on the other axes, as "pp 1".
    ``cells`` maps (row, column) to the description of a rank. In a large layout only one of several equal ranks is
    described, so cells may be missing.
    """

    title: str
    rows: str
    columns: str
    height: int
    width: int
    cells: Mapping[tuple[int, int], Rank]


def rank_grids(description: Description) -> tuple[Grid, ...]:
    """Returns the ranks as 2-D grids over the last two axes of the mesh, one for each index on the other axes.

    In a mesh of fewer than two axes, the name of a missing axis is "".

    >>> ranks = [{"rank": r, "coord": {"pp": r // 4, "dp": r // 2 % 2, "tp": r % 2}} for r in range(8)]
    >>> first, second = rank_grids({"mesh": {"pp": 2, "dp": 2, "tp": 2}, "ranks": ranks})
    >>> second.title, second.rows, second.columns, [rank["rank"] for rank in second.cells.values()]
    ('pp 1', 'dp', 'tp', [4, 5, 6, 7])
    """
    mesh = description["mesh"]
    axes: list[str] = ["", "", *mesh]
    *outer, rows, columns = axes
    cells_by_title: dict[str, dict[tuple[int, int], Rank]] = {}
    for rank in description["ranks"]:
        coord = rank["coord"]
        title = ", ".join(f"{axis} {coord[axis]}" for axis in outer if axis)
        cells_by_title.setdefault(title, {})[coord.get(rows, 0), coord.get(columns, 0)] = rank
    height, width = mesh.get(rows, 1), mesh.get(columns, 1)
    return tuple(Grid(title, rows, columns, height, width, cells) for title, cells in cells_by_title.items())


def num_grids(description: Description) -> int:
    """Returns the number of 2-D grids of a mesh: one for each combination of indices on all axes but the last two."""
    return prod([*description["mesh"].values()][:-2])


def slice_letter(index: int) -> str:
    """Returns the letters that stand for slice ``index`` of the parameters in drawings: A to Z, then AA, AB and so on.

    >>> slice_letter(0), slice_letter(25), slice_letter(26)
    ('A', 'Z', 'AA')
    """
    letters = ""
    while index >= 0:
        index, letter = index // 26 - 1, chr(ord("A") + index % 26)
        letters = letter + letters
    return letters


def shortened(count: int, most: int) -> list[int | None]:
    """Returns the indices to draw of ``count`` if only ``most`` fit: the first ones, None for a gap, the last one.

    >>> shortened(4, 5), shortened(9, 4)
    ([0, 1, 2, 3], [0, 1, None, 8])
    """
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


class RankGroup(NamedTuple):
    """Ranks that store and send the same, have as many samples and tokens, and are listed under one name."""

    name: str
    ranks: tuple[Rank, ...]


def rank_groups(description: Description, many: int = MANY_RANKS) -> list[RankGroup]:
    """Returns the ranks in groups to list; up to ``many`` ranks, each is a group of its own.

    With more ranks, those that store and send the same, and have as many samples and tokens, are one group.

    >>> alike = {"parameter_bytes": 8, "gradient_bytes": 8, "optimizer_bytes": 16}
    >>> ranks = [{"rank": r, "coord": {"dp": r // 2, "tp": r % 2}, **alike, "samples": r % 2} for r in range(20)]
    >>> description = {"mesh": {"dp": 10, "tp": 2}, "ranks": ranks}
    >>> [group.name for group in rank_groups(description)]
    ['tp 0 (10 ranks)', 'tp 1 (10 ranks)']
    >>> [group.name for group in rank_groups(description, many=20)][:2]
    ['rank 0', 'rank 1']
    """
    ranks = description["ranks"]
    if len(ranks) <= many and len(ranks) == description.get("world_size", len(ranks)):
        return [RankGroup(f"rank {rank['rank']}", (rank,)) for rank in ranks]
    groups: dict[object, list[Rank]] = {}
    for rank in ranks:
        sent = tuple(rank.get("sent_bytes", {}).items())
        key = (*(rank[state] for state in STATES), rank.get("samples"), rank.get("tokens_of_each"), sent)
        groups.setdefault(key, []).append(rank)
    return [RankGroup(_group_name(group, description["mesh"]), tuple(group)) for group in groups.values()]


def _group_name(ranks: Sequence[Rank], mesh: Mapping[str, int]) -> str:
    """Returns a group's name: by its axes if it is a block of the mesh, else by its ranks, or by the first of many."""
    total = sum(rank.get("alike", 1) for rank in ranks)
    if total == prod(mesh.values()) > 1:
        return f"all {total:,} ranks"
    if total > len(ranks):
        return f"rank {ranks[0]['rank']} and {total - 1:,} like it"
    if len(ranks) == 1:
        return f"rank {ranks[0]['rank']}"
    indices = {axis: sorted({rank["coord"][axis] for rank in ranks}) for axis in mesh}
    some = [f"{axis} {numbers(coords)}" for axis, coords in indices.items() if len(coords) < mesh[axis]]
    if len(ranks) == prod(map(len, indices.values())):
        return f"{', '.join(some)} ({len(ranks):,} ranks)"
    return f"{len(ranks):,} ranks: {numbers([rank['rank'] for rank in ranks])}"


class LayerRow(NamedTuple):
    """A row of the table of layers that ``show`` prints, for layers that differ only in the number of their block.

    ``module`` is the path of these ``num_layers`` layers, with * for numbers, and ``kind`` is their class. ``role``
    says how they are parallelized and ``why`` gives the reason. ``shapes`` describes each parameter as text.
    """

    module: str
    num_layers: int
    kind: str
    role: str
    why: str
    shapes: tuple[str, ...]


def layer_rows(description: Description) -> list[LayerRow]:
    """Returns the rows of the table of layers: ``blocks.0.up`` and ``blocks.1.up`` share the row ``blocks.*.up``.

    >>> layers = [
    ...     {"module": f"blocks.{n}.up", "kind": "Linear", "role": "column", "why": f"before 'blocks.{n}.down'",
    ...      "parameters": []} for n in range(4)]
    >>> layer_rows({"layers": layers, "parameters": []})[0][:-1]
    ('blocks.*.up', 4, 'Linear', 'column', "before 'blocks.*.down'")
    """
    parameters = {parameter["name"]: parameter for parameter in description["parameters"]}
    groups: dict[object, list[LayerEntry]] = {}
    for layer in description["layers"]:
        shapes = tuple(_shapes(parameters[name]) for name in layer["parameters"])
        names = layer["why"].split("'")  # the parts at odd positions are module names
        why = tuple(starred(part) if odd % 2 else part for odd, part in enumerate(names))
        key = (starred(layer["module"]), layer["kind"], layer["role"], why, shapes)
        groups.setdefault(key, []).append(layer)
    every: dict[str, list[str]] = {}
    for layer in description["layers"]:
        every.setdefault(starred(layer["module"]), []).append(layer["module"])
    return [_row(members, every, parameters) for members in groups.values()]


def _row(
    members: Sequence[LayerEntry], every: Mapping[str, Sequence[str]], parameters: Mapping[str, LayerEntry]
) -> LayerRow:
    first, names = members[0], [layer["module"] for layer in members]
    whys = zip(*(layer["why"].split("'") for layer in members), strict=True)
    return LayerRow(
        _merged(names, every[starred(names[0])]) or "(model)",
        len(members),
        first["kind"],
        first["role"],
        "'".join(_merged(parts, parts) if odd % 2 else parts[0] for odd, parts in enumerate(whys)),
        tuple(_shapes(parameters[name]) for name in first["parameters"]),
    )


def starred(path: str) -> str:
    """Returns a module path with its numbers replaced by stars; a path that is only a number is unchanged.

    >>> starred("blocks.3.mlp.up"), starred("3")
    ('blocks.*.mlp.up', '3')
    """
    parts = path.split(".")
    return path if len(parts) == 1 else ".".join("*" if part.isdecimal() else part for part in parts)


def _merged(names: Sequence[str], every: Sequence[str]) -> str:
    """Returns one label for ``names``, which differ in numbers only; a star stands for all the numbers in ``every``."""
    parts = []
    for position, values in enumerate(zip(*(name.split(".") for name in names), strict=True)):
        words = list(dict.fromkeys(values))
        possible = {name.split(".")[position] for name in every}
        some = f"{{{numbers(sorted(map(int, words)))}}}" if len(words) > 1 else words[0]
        parts.append("*" if len(words) > 1 and set(words) == possible else some)
    return ".".join(parts)


def _shapes(parameter: LayerEntry) -> str:
    """Returns text on a parameter: name, shape, local shapes if they differ, and its layout at rest if that differs."""
    whole, *local = (
        "x".join(map(str, shape)) or "one number" for shape in (parameter["shape"], *parameter["local_shapes"])
    )
    own, stored = parameter["name"].rpartition(".")[2], parameter["rest"]["parameter"]
    shapes = f" -> {' | '.join(local)}" if local != [whole] else ""
    return f"{own} {whole}{shapes}" + (f", at rest {stored}" if stored != parameter["cut"] else "")
