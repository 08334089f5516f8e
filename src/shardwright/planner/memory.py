"""Predicts the peak memory of each pipeline stage over a step, from what its actions allocate in rehearsals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from shardwright.ledger.tracking import KINDS
from shardwright.planner.extended import Span, at_blocks, shapes_of, span_of
from shardwright.planner.moments import front_of
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
    """Returns the most bytes beyond those before an action, by kind at that moment, and what it leaves behind."""
    fewer, *others = shapes_of(records.stages[stage], place)
    if not others:
        return max(fewer.moments, key=sum), fewer.net
    (more,), span = others, span_of(records, stage, place)
    found = max(_moments(fewer.moments, more.moments, span), key=sum)
    return tuple(map(round, found)), tuple(map(round, at_blocks(span, (fewer.net, more.net))))


def _moments(fewer: Sequence[Held], more: Sequence[Held], span: Span) -> Iterator[tuple[float, ...]]:
    """Yields what an action holds beyond what was held before it, at the moments of which one is the peak.

    Until the second block ends as much happens with all blocks as with more, but for the first moment, at which
    gradients of all blocks may be freed. After the last block what is held is affine in their number. The last block
    with more blocks has one before it, so that messages of that one may be under way. It stands for the second block of
    all and for the last; those between hold no more than one of the two.
    """
    low, high, at = span
    front, one_block = front_of(fewer, more)[0], len(more) - len(fewer)
    if at < high or high == low or not one_block:
        yield from (
            at_blocks(span, (before, more[number if number < front else number + one_block]))
            for number, before in enumerate(fewer)
        )
        return
    until = front + one_block
    behind = [at_blocks(span, pair) for pair in zip(fewer[front:], more[until:], strict=True)]
    ends = behind[0] if behind else at_blocks(span, (fewer[-1], more[-1]))
    first, last = at_blocks(span, (fewer[0], more[0])), more[until if behind else -1]
    for moments, shift in ((more[:until], map(sub, first, more[0])), (more[front:until], map(sub, ends, last))):
        yield tuple(map(add, max(moments, key=sum), shift))
    yield from behind
