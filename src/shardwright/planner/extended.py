"""Extrapolates what an action of a pipeline stage does from rehearsals with few blocks to all blocks of the stage."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.places import Place, like
from shardwright.planner.records import ActionShape, LayoutRecords, StageRecords

Span = tuple[int, int, int]
"""The blocks of the two rehearsals, fewer and more, and those of the stage."""


def extended(at: int, fewer: Sequence[float], more: Sequence[float], low: int, high: int) -> tuple[float, ...]:
    """Returns numbers at ``at`` blocks, by linear extrapolation from those at ``low`` blocks and at ``high`` blocks.

    If ``low`` equals ``high``, the numbers ``fewer`` are returned.

    >>> extended(4, [1.0], [2.0], 1, 2)
    (4.0,)
    """
    if high == low:
        return tuple(fewer)
    return tuple(a + (b - a) * (at - low) / (high - low) for a, b in zip(fewer, more, strict=True))


def at_blocks(span: Span, rehearsed: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns numbers for all blocks of a stage, extrapolated from two rehearsals, or those of a single one unchanged.

    ``span`` gives the blocks of the rehearsal with fewer, of that with more, and of the stage.
    """
    low, high, at = span
    return tuple(rehearsed[0]) if len(rehearsed) == 1 else extended(at, rehearsed[0], rehearsed[1], low, high)


def shapes_of(kind: StageRecords, place: Place | None) -> tuple[ActionShape, ...]:
    """Returns what one action of a stage does, in the rehearsal with fewer blocks and in that with more.

    The action is the one at ``place``, or the optimizer's step if that is None. The tuple has one entry if the stage
    was rehearsed once, as it is.
    """
    rehearsed = (kind.fewer,) if kind.more is None else (kind.fewer, kind.more)
    if place is None:
        return tuple(each.update for each in rehearsed)
    known = like(place, kind.fewer.actions)
    assert known is not None, "checked when the layout was recorded"
    return tuple(each.actions[known] for each in rehearsed)


def span_of(records: LayoutRecords, stage: int, place: Place | None) -> Span:
    """Returns the numbers of blocks by which an action is extrapolated.

    These are the blocks of the rehearsal with fewer, of that with more, and of the stage itself. They are those of the
    chunk that the action at ``place`` runs, or of all chunks of the stage if that is None. All are 0 if the stage was
    rehearsed as it is.
    """
    kind, blocks = records.stages[stage], records.num_blocks[stage]
    if kind.more is None:
        return 0, 0, 0
    if place is None:
        return sum(kind.fewer.num_blocks), sum(kind.more.num_blocks), sum(blocks)
    return kind.fewer.num_blocks[place.slot], kind.more.num_blocks[place.slot], blocks[place.slot]
