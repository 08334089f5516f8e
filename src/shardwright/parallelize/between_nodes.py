"""Computes the bytes that each axis of a layout sends between nodes, and warns if tensor parallelism crosses nodes.

The link between nodes is slower than those inside a node. Pipelines send the least over it and data parallelism sends
once a step, but tensor parallelism sends in every layer, and each layer waits for its messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwright.axes import mesh_axes
from shardwright.formatting import format_bytes
from shardwright.mesh import Mesh
from shardwright.nodes import share_between
from shardwright.plan.traffic import Traffic


def bytes_between(
    mesh: Mesh, places: Sequence[int], traffic_of: Callable[[int], Iterable[Traffic]], ranks: Iterable[int]
) -> Counter[str]:
    """Returns the bytes that all of ``ranks`` together send to other nodes in one step, by axis of the mesh.

    ``places`` gives the node of each rank, and ``traffic_of(rank)`` the collectives and sends of a rank. A collective
    over several axes counts for the first of them in the mesh's order.
    """
    bytes_by_axis: Counter[str] = Counter()
    for rank in ranks:
        for call in traffic_of(rank):
            axes = tuple(call.axis.split("+"))
            axes = mesh.axes if axes == ("world",) else axes
            share = share_between(mesh, axes, rank, places, ring=call.kind != "send")
            bytes_by_axis[axes[0]] += round(call.sent_bytes * share)
    return bytes_by_axis


def crossing_pairs(mesh: Mesh, places: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Returns, for each axis whose groups reach across nodes, two ranks of one group that are on different nodes.

    ``places`` gives the node of each rank. Axes that stay within nodes are left out.
    """
    pairs = {}
    for axis in mesh.axes:
        for group in mesh.groups(axis):
            other = next((rank for rank in group if places[rank] != places[group[0]]), None)
            if other is not None:
                pairs[axis] = group[0], other
                break
    return pairs


def node_warnings(mesh: Mesh, places: Sequence[int], num_bytes: Mapping[str, float] | None) -> list[str]:
    """Returns a warning, as text, for each axis that cuts operators, such as ``tp``, and has groups across nodes.

    ``places`` gives the node of each rank. ``num_bytes`` gives the bytes that each axis sends between nodes in a step,
    which the warning states; None if they are not known.

    >>> print(*node_warnings(Mesh(dp=3, tp=2), (0, 0, 0, 1, 1, 1), {"tp": 3 * 2**20}), sep="\\n")
    'tp' crosses nodes: ranks 2 and 3 are on nodes 0 and 1, and 3.0 MiB a step go over the link between nodes, which
    every layer waits for; fix: nodes whose number of ranks is a multiple of 2, or less of 'tp' and more of 'dp'
    """
    warnings, block = [], 1
    pairs = crossing_pairs(mesh, places)
    for axis in reversed(mesh.axes):
        block *= mesh[axis]
        if axis in pairs and axis in mesh_axes("operators"):
            a, b = pairs[axis]
            price = "what it sends" if num_bytes is None else f"{format_bytes(num_bytes.get(axis, 0))} a step"
            go = "goes" if num_bytes is None else "go"
            warnings.append(
                f"'{axis}' crosses nodes: ranks {a} and {b} are on nodes {places[a]} and {places[b]}, and {price} {go} "
                f"over the link between nodes, which every layer waits for; fix: nodes whose number of ranks is a "
                f"multiple of {block}, or less of '{axis}' and more of 'dp'"
            )
    return warnings
