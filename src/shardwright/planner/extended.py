"""Extrapolates the time, memory and bytes of an action from a model with few blocks to all blocks of a stage."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int, int]
"""Three numbers of blocks: in the rehearsal with fewer, in the one with more, and in the stage itself."""


def extended(at: int, fewer: Sequence[float], more: Sequence[float], low: int, high: int) -> tuple[float, ...]:
    """Returns numbers at ``at`` blocks, by linear extrapolation from those at ``low`` blocks and at ``high`` blocks.

    If ``low`` equals ``high``, the numbers ``fewer`` are returned.

    >>> extended(4, [1.0], [2.0], 1, 2)
    (4.0,)
    """
    if high == low:
        return tuple(fewer)
    beyond, apart = at - low, high - low
    return tuple([a + (b - a) * beyond / apart for a, b in zip(fewer, more, strict=True)])
