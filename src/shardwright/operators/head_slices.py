"""Which heads, and which elements of them, each rank of an axis holds.

N query heads, M key and value heads, D head width, p ranks. While p <= N a rank holds whole heads; beyond that a
head belongs to several ranks, each holding some of its elements::

    N = 4, p = 2     0 0 | 1 1             N = 2, p = 5     0 0 0 | 1 1       D in 3 parts, and in 2
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from shardwright.errors import LayoutError
from shardwright.mesh import balanced
from shardwright.models.attention import Attention
from shardwright.sharding.box import balanced_ranges

Attends = Attention | nn.MultiheadAttention
"""What has ``num_heads`` heads of ``head_dim`` elements."""


def query_heads(attention: Attends, tp: int) -> tuple[tuple[int, ...], ...]:
    """The query heads of each index: several, or one that is shared with its neighbours.

    >>> query_heads(Attention(8, 4), 3), query_heads(nn.MultiheadAttention(8, 2), 3)
    (((0, 1), (2,), (3,)), ((0,), (0,), (1,)))
    """
    if tp <= attention.num_heads:
        return tuple(tuple(range(a, b)) for ((a, b),) in balanced_ranges(attention.num_heads, tp))
    groups = balanced(tp, attention.num_heads)
    return tuple((h,) for h in range(attention.num_heads) for _ in range(groups[h], groups[h + 1]))


def head_slices(attention: Attends, tp: int) -> tuple[tuple[int, int], ...]:
    """Which elements of its heads each index holds; pairs of elements where a rotation turns them together.

    Raises: LayoutError: more ranks than there are elements.

    >>> head_slices(Attention(8, 2), 2), head_slices(Attention(8, 2), 3)
    (((0, 4), (0, 4)), ((0, 2), (2, 4), (0, 4)))
    """
    turned = _halves(attention) > 1
    size = attention.head_dim // _halves(attention)
    if tp <= attention.num_heads:
        return ((0, size),) * tp
    if tp > size * attention.num_heads:
        raise LayoutError(
            "more tp ranks than the attention can use",
            given=f"tp={tp}, {attention.num_heads} heads of {attention.head_dim} elements"
            + (", turned in pairs" if turned else ""),
            allowed=f"tp from 1 to {size * attention.num_heads}",
            fix=f"set tp={size * attention.num_heads}, or move the other ranks to 'dp'",
        )
    groups = balanced(tp, attention.num_heads)
    slices: list[tuple[int, int]] = []
    for a, b in pairwise(groups):
        cuts = balanced(size, b - a)
        slices += pairwise(cuts)
    return tuple(slices)


def kv_heads(attention: Attention, heads: tuple[int, ...]) -> tuple[int, ...]:
    """The key and value heads that these query heads use."""
    group = attention.num_heads // attention.num_kv_heads
    return tuple(range(heads[0] // group, heads[-1] // group + 1))


def head_rows(attention: Attends, heads: tuple[int, ...], part: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The rows of a projection that belong to these elements of these heads, in the order of the heads.

    >>> head_rows(Attention(8, 2), (1,), (0, 2)), head_rows(Attention(8, 2, rotary=True), (1,), (0, 1))
    (((4, 6),), ((4, 5), (6, 7)))
    """
    halves = _halves(attention)
    step = attention.head_dim // halves
    return tuple(
        (head * attention.head_dim + half * step + part[0], head * attention.head_dim + half * step + part[1])
        for head in heads
        for half in range(halves)
    )


def _halves(attention: Attends) -> int:
    """2 where a rotation turns the elements of a head in pairs, one of each half."""
    return 2 if isinstance(attention, Attention) and attention.rotary is not None else 1
