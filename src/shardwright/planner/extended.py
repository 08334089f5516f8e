"""Extrapolates the time, memory and bytes of an action from a model with few blocks to all blocks of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.planner.places import ActionClass, like
from shardwright.planner.records import ActionShape, LayoutRecords

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


def at_blocks(span: Span, rehearsed: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Returns numbers, such as seconds or bytes, for all blocks of a stage, extrapolated from those for fewer blocks.

    ``rehearsed`` has the numbers of two steps on the meta device, with fewer and with more blocks, or of a single one,
    which are returned unchanged. ``span`` has the numbers of blocks of the two, and that of the stage.
    """
    low, high, at = span
    return tuple(rehearsed[0]) if len(rehearsed) == 1 else extended(at, rehearsed[0], rehearsed[1], low, high)


def shapes_of(records: LayoutRecords, stage: int, place: ActionClass | None) -> tuple[ActionShape, ...]:
    """Returns the operators, messages and memory of one action of a stage, rehearsed with fewer and with more blocks.

    The action is one of the class ``place``, or of the most similar class that was rehearsed; if ``place`` is None, it
    is the optimizer's step. The tuple has one entry if the stage was rehearsed once, with all its blocks.
    """
    kind = records.stages[stage]
    rehearsed = (kind.fewer,) if kind.more is None else (kind.fewer, kind.more)
    if place is None:
        return tuple(each.update for each in rehearsed)
    key = id(kind.fewer), place
    if key not in records.found_alike:
        records.found_alike[key] = like(place, kind.fewer.actions)
    known = records.found_alike[key]
    assert known is not None, "checked when the layout was recorded"
    return tuple(each.actions[known] for each in rehearsed)


def span_of(records: LayoutRecords, stage: int, place: ActionClass | None) -> Span:
    """Returns how many blocks an action runs in the rehearsal with fewer, in that with more, and in the stage itself.

    The blocks are those of the chunk that an action of the class ``place`` runs, or of all chunks of the stage if
    ``place`` is None. All three are 0 if the stage was rehearsed with all its blocks.
    """
    kind, blocks = records.stages[stage], records.num_blocks[stage]
    if kind.more is None:
        return 0, 0, 0
    if place is None:
        return sum(kind.fewer.num_blocks), sum(kind.more.num_blocks), sum(blocks)
    return kind.fewer.num_blocks[place.slot], kind.more.num_blocks[place.slot], blocks[place.slot]
