"""Extrapolates the time, memory and bytes of an action from a model with few blocks to all blocks of a stage."""

from __future__ import annotations

from collections.abc import Sequence

RepeatedSpan = tuple[int, int, int]
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


def at_blocks(span: RepeatedSpan, rehearsed: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns numbers, such as seconds or bytes, for all blocks of a stage, extrapolated from those for fewer blocks.

    ``rehearsed`` has the numbers of two steps on the meta device, with fewer and with more blocks, or of a single one,
    which are returned unchanged. ``span`` has the numbers of blocks of the two, and that of the stage.
    """
    low, high, at = span
    return tuple(rehearsed[0]) if len(rehearsed) == 1 else extended(at, rehearsed[0], rehearsed[1], low, high)
