"""What a stage's action does with all of its blocks, from the rehearsals with fewer and with more."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.places import Place, like
from shardwright.planner.records import ActionShape, LayoutRecords, StageRecords

Span = tuple[int, int, int]
"""The blocks of the two rehearsals, fewer and more, and those of the stage."""


def extended(at: int, fewer: Sequence[float], more: Sequence[float], low: int, high: int) -> tuple[float, ...]:
    """Returns numbers at ``at`` blocks from those with ``low`` and ``high`` blocks, in which they are affine.

    >>> extended(4, [1.0], [2.0], 1, 2)
    (4.0,)
    """
    if high == low:
        return tuple(fewer)
    return tuple(a + (b - a) * (at - low) / (high - low) for a, b in zip(fewer, more, strict=True))


def at_blocks(span: Span, rehearsed: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns the numbers of one rehearsal alone, or those of two, extended to the blocks of the stage."""
    low, high, at = span
    return tuple(rehearsed[0]) if len(rehearsed) == 1 else extended(at, rehearsed[0], rehearsed[1], low, high)


def shapes_of(kind: StageRecords, place: Place | None) -> tuple[ActionShape, ...]:
    """Returns what the action at a place does with fewer and with more blocks; None for the optimizer's step."""
    rehearsed = (kind.fewer,) if kind.more is None else (kind.fewer, kind.more)
    if place is None:
        return tuple(each.update for each in rehearsed)
    known = like(place, kind.fewer.actions)
    assert known is not None, "checked when the layout was recorded"
    return tuple(each.actions[known] for each in rehearsed)


def span_of(records: LayoutRecords, stage: int, place: Place | None) -> Span:
    """Returns the blocks of the two rehearsals, fewer and more, and those of the stage: of one chunk, or of all."""
    kind, blocks = records.stages[stage], records.num_blocks[stage]
    if kind.more is None:
        return 0, 0, 0
    if place is None:
        return sum(kind.fewer.num_blocks), sum(kind.more.num_blocks), sum(blocks)
    return kind.fewer.num_blocks[place.slot], kind.more.num_blocks[place.slot], blocks[place.slot]
