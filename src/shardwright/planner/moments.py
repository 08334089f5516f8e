"""Compares what an action holds, moment by moment, in its rehearsals with fewer and with more blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add, ne, sub

Moments = Sequence[tuple[int, ...]]
"""Bytes by kind of memory, after each operator of an action that allocates memory and at its end."""


def front_of(fewer: Moments, more: Moments) -> tuple[int, int]:
    """Aligns the memory traces of one action from two rehearsals, one of which has more blocks.

    It returns how many moments of the shorter trace come before the end of the last block, where those of the further
    blocks are put in, and how many others differ.

    With as many moments of both matched from the start, and the others from the end, most changes from moment to moment
    are the same: of such numbers the largest is returned. The second number is that of the changes that differ all the
    same, as where a block's input came from another stage. The first and the last moment are not counted: gradients of
    all blocks may be freed and made there.

    >>> front_of([(1,), (5,), (2,)], [(1,), (5,), (2,), (6,), (3,)])
    (3, 0)
    """
    some, others = _changes(fewer), _changes(more)
    from_start = [*accumulate(map(ne, some, others), initial=0)]
    from_end = [*accumulate(map(ne, reversed(some), reversed(others)), initial=0)]
    unlike = [*map(add, from_start, reversed(from_end))]
    front = max(range(1, len(unlike)), key=lambda number: (-unlike[number], number))
    at_the_ends = (some[0] != others[0]) + (len(some) > front and some[-1] != others[-1])
    return front, unlike[front] - at_the_ends


def _changes(moments: Moments) -> list[tuple[int, ...]]:
    """Returns what is allocated and freed, by kind, up to each moment since the one before."""
    nothing = tuple(0 for _ in moments[0])
    return [tuple(map(sub, moment, before)) for before, moment in pairwise((nothing, *moments))]
