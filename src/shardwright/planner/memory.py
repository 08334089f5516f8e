"""Predicts the peak memory of each pipeline stage over a step, from what its actions allocate in rehearsals."""

from __future__ import annotations

from collections.abc import Mapping
from operator import add
from typing import NamedTuple

from shardwright.ledger.tracking import KINDS
from shardwright.planner.extended import at_blocks, shapes_of, span_of
from shardwright.planner.places import ActionClass
from shardwright.planner.records import Held, LayoutRecords


class StageMemory(NamedTuple):
    """The peak memory of a rank of a stage: bytes of tensors by kind at the peak, and bytes held beside tensors.

    ``beside`` counts cuBLAS workspace and NCCL buffers.
    """

    by_kind: Mapping[str, int]
    beside: int

    @property
    def num_bytes(self) -> int:
        """The bytes of device memory in all: of tensors, and beside them."""
        return sum(self.by_kind.values()) + self.beside


def memory_by_stage(records: LayoutRecords) -> tuple[StageMemory, ...]:
    """Returns the peak memory of each stage, by adding up what its actions allocate and free in schedule order."""
    known: dict[object, _ActionMemory] = {}  # stages alike do the same
    return tuple(_stage_memory(records, stage, known) for stage in range(records.schedule.num_stages))


class _ActionMemory(NamedTuple):
    """The most bytes beyond those before an action, by kind at that moment, what it leaves behind, and their sums."""

    most: Held
    net: Held
    most_bytes: int
    net_bytes: int


def _stage_memory(records: LayoutRecords, stage: int, known: dict[object, _ActionMemory]) -> StageMemory:
    held = peak = _base(records, stage)
    held_bytes, peak_bytes = sum(held), sum(peak)
    kind, where = records.stages[stage], records.places[stage]
    for action in (*records.schedule.actions[stage], None):  # None: the optimizer's step
        place = None if action is None else where[action]
        key = id(kind.fewer), place, span_of(records, stage, place)
        changes = known.get(key)
        if changes is None:
            most, net = _most(records, stage, place)
            changes = known[key] = _ActionMemory(most, net, sum(most), sum(net))
        if held_bytes + changes.most_bytes > peak_bytes:
            peak, peak_bytes = tuple(map(add, held, changes.most)), held_bytes + changes.most_bytes
        held, held_bytes = tuple(map(add, held, changes.net)), held_bytes + changes.net_bytes
    beside = sum(size for name, size in kind.fewer.beside.items() if name in ("workspace", "nccl"))
    return StageMemory(dict(zip(KINDS, map(round, peak), strict=True)), beside)


def held_at_rest(records: LayoutRecords, stage: int) -> Mapping[str, int]:
    """Returns the bytes that a stage holds before a step, by kind of memory; gradients are those of the step before."""
    return dict(zip(KINDS, _base(records, stage), strict=True))


def kept_bytes(records: LayoutRecords, stage: int) -> int:
    """Returns the bytes that a stage's first forward, of one microbatch on one chunk, keeps for its backward."""
    place = next(each for each in records.stages[stage].fewer.actions if each.kind == "F")
    _, left = _most(records, stage, place)
    # the gradients of the step before are freed meanwhile
    return max(0, sum(size for name, size in zip(KINDS, left, strict=True) if name != "gradients"))


def _base(records: LayoutRecords, stage: int) -> Held:
    kind = records.stages[stage]
    rehearsed = [each.base for each in (kind.fewer, kind.more) if each is not None]
    base = tuple(map(round, at_blocks(span_of(records, stage, None), rehearsed)))
    batch, number = KINDS.index("batch"), records.schedule.num_microbatches
    return (*base[:batch], base[batch] * number // kind.fewer.num_microbatches, *base[batch + 1 :])


def _most(records: LayoutRecords, stage: int, place: ActionClass | None) -> tuple[Held, Held]:
    """Returns the most bytes beyond those before an action, by kind at that moment, and what it leaves behind.

    Moments of the first half are matched from the start, those of the second from the end: between the two stand
    blocks alike, of which the first or the last holds most.
    """
    fewer, *others = shapes_of(records.stages[stage], place)
    if not others:
        return max(fewer.moments, key=sum), fewer.net
    (more,), span = others, span_of(records, stage, place)
    half = len(fewer.moments) // 2
    pairs = [*zip(fewer.moments[:half], more.moments[:half], strict=True)]
    pairs += zip(fewer.moments[half:], more.moments[len(more.moments) - len(fewer.moments) + half :], strict=True)
    moments = [at_blocks(span, pair) for pair in pairs]
    net = at_blocks(span, (fewer.net, more.net))
    return tuple(map(round, max(moments, key=sum))), tuple(map(round, net))
