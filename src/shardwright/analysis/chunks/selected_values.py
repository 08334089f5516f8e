"""Finds values that cross from one pipeline chunk to another and whose number of rows depends on data.

Examples are the rows that ``x[mask]`` or ``torch.where(mask)`` selects for an expert. Their number changes from
microbatch to microbatch, but a receiving stage would expect the number of the first microbatch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from shardwright.analysis.chunks.call_graph import ChunkedModel
from shardwright.analysis.chunks.in_place_writes import name_of

_SELECTIONS = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"))
_COMPARISONS = frozenset((
    "eq", "ne", "lt", "le", "gt", "ge", "isin", "isnan", "isfinite", "logical_and", "logical_or", "logical_not", "bool",
    "and_", "or_", "invert", "bitwise_and", "bitwise_or", "bitwise_not",
))  # fmt: skip
_OF_MASKS = frozenset((
    "any", "all", "getitem", "unsqueeze", "squeeze", "view", "reshape", "flatten", "t", "transpose", "permute",
    "expand", "expand_as", "repeat", "clone", "detach", "cat", "stack",
))  # fmt: skip
"""Functions that return a mask if their first operand is a mask."""

_WRITES = frozenset((
    "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "index_fill", "index_fill_",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "masked_scatter",
    "masked_scatter_", "masked_fill", "masked_fill_",
))  # fmt: skip
"""Functions whose result has the shape of their first operand, even if selected rows are written into it."""


def crossing_selection(chunked: ChunkedModel) -> str:
    """Returns the name of a tensor that one chunk sends to another and whose number of rows depends on data, or "".

    >>> from torch import nn
    >>> from shardwright.analysis.chunks.call_graph import CallSite, read_graph
    >>> class Chosen(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(2, 3), nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         x = self.up(x)
    ...         return self.down(x[x.sum(-1) > 0])
    >>> model = Chosen()
    >>> crossing_selection(ChunkedModel(read_graph(model), {CallSite("up"): 0, CallSite("down"): 1}, 2))
    'getitem'
    """
    selected = _selected(chunked.graph.nodes)
    crossing = (value for edge in chunked.edges for value in edge.values)
    return next((value for value in crossing if value in selected), "")


def _selected(nodes: Iterable[fx.Node]) -> set[str]:
    """Returns the names of the nodes that select by values, and of all nodes that are computed from these."""
    masks, selections = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        name, operands = name_of(node), node.all_input_nodes
        first = node.args[0] if node.args else None
        if name in _COMPARISONS or (name in _OF_MASKS and operands and operands[0] in masks):
            masks.add(node)
        by_mask = node.target is operator.getitem and any(operand in masks for operand in operands[1:])
        if by_mask or name in _SELECTIONS or (name == "where" and len(operands) == 1):
            selections.add(node)
        elif name in _WRITES:
            if isinstance(first, fx.Node) and first in selections:
                selections.add(node)
        elif any(operand in selections for operand in operands):
            selections.add(node)
    return {node.name for node in selections}
