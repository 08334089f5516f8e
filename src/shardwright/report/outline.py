"""A description cut down to what fits a page: grids of ranks, ranks that are alike, blocks that are alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from shardwright.report.description import STATES, Description
from shardwright.sharding.words import numbers

Rank: TypeAlias = Mapping[str, Any]
Layer: TypeAlias = Mapping[str, Any]

MANY_RANKS = 16
"""With more ranks than this, ranks that hold and send the same are told of together."""


class Grid(NamedTuple):
    """The ranks that differ on the two fastest axes: one row for each index on ``rows``, one column on ``columns``.

    ``height`` and ``width`` count all indices. Of very many ranks not all are described, and ``cells`` has those that
    are: at the first indices and the last.
    """

    title: str
    rows: str
    columns: str
    height: int
    width: int
    cells: Mapping[tuple[int, int], Rank]


def rank_grids(description: Description) -> tuple[Grid, ...]:
    """The ranks in grids, slowest axes apart; an axis that the mesh lacks is named "".

    >>> ranks = [{"rank": r, "coord": {"pp": r // 4, "dp": r // 2 % 2, "tp": r % 2}} for r in range(8)]
    >>> first, second = rank_grids({"mesh": {"pp": 2, "dp": 2, "tp": 2}, "ranks": ranks})
    >>> second.title, second.rows, second.columns, [rank["rank"] for rank in second.cells.values()]
    ('pp 1', 'dp', 'tp', [4, 5, 6, 7])
    """
    mesh = description["mesh"]
    axes: list[str] = ["", "", *mesh]
    *outer, rows, columns = axes
    found: dict[str, dict[tuple[int, int], Rank]] = {}
    for rank in description["ranks"]:
        coord = rank["coord"]
        title = ", ".join(f"{axis} {coord[axis]}" for axis in outer if axis)
        found.setdefault(title, {})[coord.get(rows, 0), coord.get(columns, 0)] = rank
    height, width = mesh.get(rows, 1), mesh.get(columns, 1)
    return tuple(Grid(title, rows, columns, height, width, cells) for title, cells in found.items())


def num_grids(description: Description) -> int:
    """How many grids all ranks make, described or not."""
    return prod([*description["mesh"].values()][:-2])


def slice_letter(index: int) -> str:
    """The name of a slice: A to Z, then AA, AB and on.

    >>> slice_letter(0), slice_letter(25), slice_letter(26)
    ('A', 'Z', 'AA')
    """
    letters = ""
    while index >= 0:
        index, letter = index // 26 - 1, chr(ord("A") + index % 26)
        letters = letter + letters
    return letters


def shortened(count: int, most: int) -> list[int | None]:
    """The indices to draw of ``count`` things where only ``most`` fit: the first ones, a gap, the last one.

    >>> shortened(4, 5), shortened(9, 4)
    ([0, 1, 2, 3], [0, 1, None, 8])
    """
    return list(range(count)) if count <= most else [*range(most - 2), None, count - 1]


class RankGroup(NamedTuple):
    """Ranks that hold and send the same, and a name for them."""

    name: str
    ranks: tuple[Rank, ...]


def rank_groups(description: Description, many: int = MANY_RANKS) -> list[RankGroup]:
    """The ranks to list: one by one, or of more than ``many`` those that are alike together.

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
    """By the axes where they are a block of the mesh, else by their numbers; by the first where it stands for more."""
    total = sum(rank.get("alike", 1) for rank in ranks)
    if total == prod(mesh.values()) > 1:
        return f"all {total:,} ranks"
    if total > len(ranks):
        return f"rank {ranks[0]['rank']} and {total - 1:,} like it"
    if len(ranks) == 1:
        return f"rank {ranks[0]['rank']}"
    indices = {axis: sorted({rank["coord"][axis] for rank in ranks}) for axis in mesh}
    some = [f"{axis} {numbers(found)}" for axis, found in indices.items() if len(found) < mesh[axis]]
    if len(ranks) == prod(map(len, indices.values())):
        return f"{', '.join(some)} ({len(ranks):,} ranks)"
    return f"{len(ranks):,} ranks: {numbers([rank['rank'] for rank in ranks])}"


class LayerRow(NamedTuple):
    """One line of the table of layers; several blocks with the same content share one."""

    module: str
    num_layers: int
    kind: str
    role: str
    why: str
    shapes: tuple[str, ...]


def layer_rows(description: Description) -> list[LayerRow]:
    """What is done at each layer, equal blocks in one row: ``blocks.0.up``, ``blocks.1.up`` is ``blocks.*.up``.

    >>> layers = [
    ...     {"module": f"blocks.{n}.up", "kind": "Linear", "role": "column", "why": f"before 'blocks.{n}.down'",
    ...      "parameters": []} for n in range(4)]
    >>> layer_rows({"layers": layers, "parameters": []})[0][:-1]
    ('blocks.*.up', 4, 'Linear', 'column', "before 'blocks.*.down'")
    """
    parameters = {parameter["name"]: parameter for parameter in description["parameters"]}
    groups: dict[object, list[Layer]] = {}
    for layer in description["layers"]:
        shapes = tuple(_shapes(parameters[name]) for name in layer["parameters"])
        names = layer["why"].split("'")  # the odd ones are module names
        why = tuple(_starred(part) if odd % 2 else part for odd, part in enumerate(names))
        key = (_starred(layer["module"]), layer["kind"], layer["role"], why, shapes)
        groups.setdefault(key, []).append(layer)
    every: dict[str, list[str]] = {}
    for layer in description["layers"]:
        every.setdefault(_starred(layer["module"]), []).append(layer["module"])
    return [_row(members, every, parameters) for members in groups.values()]


def _row(members: Sequence[Layer], every: Mapping[str, Sequence[str]], parameters: Mapping[str, Layer]) -> LayerRow:
    first, names = members[0], [layer["module"] for layer in members]
    whys = zip(*(layer["why"].split("'") for layer in members), strict=True)
    return LayerRow(
        _merged(names, every[_starred(names[0])]) or "(model)",
        len(members),
        first["kind"],
        first["role"],
        "'".join(_merged(parts, parts) if odd % 2 else parts[0] for odd, parts in enumerate(whys)),
        tuple(_shapes(parameters[name]) for name in first["parameters"]),
    )


def _starred(path: str) -> str:
    """A path with its numbers as stars; one that is nothing but a number stays."""
    parts = path.split(".")
    return path if len(parts) == 1 else ".".join("*" if part.isdecimal() else part for part in parts)


def _merged(names: Sequence[str], every: Sequence[str]) -> str:
    """One label for all ``names``, which differ in numbers only; a star where they take every number in ``every``."""
    parts = []
    for position, values in enumerate(zip(*(name.split(".") for name in names), strict=True)):
        found = list(dict.fromkeys(values))
        known = {name.split(".")[position] for name in every}
        some = f"{{{numbers(sorted(map(int, found)))}}}" if len(found) > 1 else found[0]
        parts.append("*" if len(found) > 1 and set(found) == known else some)
    return ".".join(parts)


def _shapes(parameter: Layer) -> str:
    """A parameter's shape, and its shapes on the ranks where they differ."""

    def spelled(shape: Sequence[int]) -> str:
        return "x".join(map(str, shape)) or "one number"

    own = parameter["name"].rpartition(".")[2]
    whole, local = spelled(parameter["shape"]), [spelled(shape) for shape in parameter["local_shapes"]]
    rest = parameter["rest"]["parameter"]
    sliced = f", at rest {rest}" if rest != parameter["cut"] else ""
    return f"{own} {whole}" + (f" -> {' | '.join(local)}" if local != [whole] else "") + sliced
