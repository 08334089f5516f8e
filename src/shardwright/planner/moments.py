"""Compares what an action holds, moment by moment, in its rehearsals with fewer and with more blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import add, ne, sub

Moments = Sequence[tuple[int, ...]]
"""Bytes by kind of memory, after each operator of an action that allocates memory and at its end."""


def front_of(fewer: Moments, more: Moments) -> tuple[int, int]:
    """Aligns the memory traces of one action from two rehearsals, of which ``more`` has further blocks.

    It returns two numbers. The first says after how many moments of ``fewer`` the moments of the further blocks come in
    ``more``: moments before that are matched from the start of both traces, and the others from their end. It is the
    number with which the fewest changes from moment to moment differ; of several, the largest.

    The second number counts the changes that still differ, as where a block's input came from another stage. The first
    and the last change are not counted, since gradients of all blocks may be freed or allocated there.

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
    """Returns the bytes, by kind, that are allocated less those freed from each moment to the next."""
    nothing = tuple(0 for _ in moments[0])
    return [tuple(map(sub, moment, before)) for before, moment in pairwise((nothing, *moments))]
