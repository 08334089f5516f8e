"""Predicts the peak memory of each pipeline stage over a step, from what its actions allocate in rehearsals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import add, sub
from typing import NamedTuple

from shardwright.ledger.tracking import KINDS
from shardwright.planner.extended import Span, at_blocks, shapes_of, span_of
from shardwright.planner.places import ActionClass
from shardwright.planner.records import ActionShape, Held, LayoutRecords


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
    base, kind, where = _base(records, stage), records.stages[stage], records.places[stage]
    changes = []
    for place in (*where.classes, None):  # None: the optimizer's step
        key = id(kind.fewer), place, span_of(records, stage, place)
        if key not in known:
            most, net = _most(records, stage, place)
            known[key] = _ActionMemory(most, net, sum(most), sum(net))
        changes.append(known[key])
    most_bytes, net_bytes = [each.most_bytes for each in changes], [each.net_bytes for each in changes]
    order = (*where.order, len(where.classes))
    held, peak, peak_at = sum(base), sum(base), -1
    for at, number in enumerate(order):
        if held + most_bytes[number] > peak:
            peak, peak_at = held + most_bytes[number], at
        held += net_bytes[number]
    by_kind = base
    if peak_at >= 0:
        parts = [[size * times for size in changes[number].net] for number, times in Counter(order[:peak_at]).items()]
        by_kind = tuple(map(sum, zip(base, changes[order[peak_at]].most, *parts, strict=True)))
    return StageMemory(dict(zip(KINDS, map(round, by_kind), strict=True)), beside_bytes(records, stage))


def offloaded_bytes(records: LayoutRecords) -> int:
    """Returns the bytes of parameters and optimizer state that are offloaded, of the rank that offloads the most."""
    found = [0]
    for stage, (fewer, more) in enumerate(records.stages):
        rehearsed = [[float(each.offloaded_bytes)] for each in (fewer, more) if each is not None]
        (size,) = at_blocks(span_of(records, stage, None), rehearsed)
        found.append(round(size))
    return max(found)


def host_bytes(records: LayoutRecords, ranks_per_node: int) -> int:
    """Returns the bytes of parameters and optimizer state that the host of a node holds, at most; 0 if none or on disk.

    All ranks of the node are taken to offload as much as the one that offloads the most.
    """
    return 0 if ":disk" in str(records.layout) else offloaded_bytes(records) * ranks_per_node


def held_at_rest(records: LayoutRecords, stage: int) -> Mapping[str, int]:
    """Returns the bytes that a stage holds before a step, by kind of memory; gradients are those of the step before."""
    return dict(zip(KINDS, _base(records, stage), strict=True))


class PassMemory(NamedTuple):
    """The bytes that one microbatch's passes on one chunk take, beyond those held before.

    ``kept`` is what its forward keeps for its backward, ``most`` the most of both at once, and ``update`` the most that
    the optimizer's step takes.
    """

    kept: float
    most: float
    update: float


def pass_memory(records: LayoutRecords, stage: int) -> PassMemory:
    """Returns the memory of a microbatch's passes on a stage's first chunk, extended to the stage's blocks.

    It is the second microbatch, if there are several: gradients are there already, and are not complete after it.
    """
    places = [*records.stages[stage].fewer.actions]
    (most, kept), (later, _) = (
        map(sum, _most(records, stage, [each for each in places if each.kind == kind][:2][-1])) for kind in "FB"
    )
    return PassMemory(max(0, kept), max(most, kept + later, 0), max(0, sum(_most(records, stage, None)[0])))


def beside_bytes(records: LayoutRecords, stage: int) -> int:
    """Returns the bytes of device memory that a stage holds beside tensors."""
    return sum(size for name, size in records.stages[stage].fewer.beside.items() if name in ("workspace", "nccl"))


def _base(records: LayoutRecords, stage: int) -> Held:
    kind = records.stages[stage]
    rehearsed = [each.base for each in (kind.fewer, kind.more) if each is not None]
    base = tuple(map(round, at_blocks(span_of(records, stage, None), rehearsed)))
    batch, number = KINDS.index("batch"), records.schedule.num_microbatches
    return (*base[:batch], base[batch] * number // kind.fewer.num_microbatches, *base[batch + 1 :])


def _most(records: LayoutRecords, stage: int, place: ActionClass | None) -> tuple[Held, Held]:
    """Returns the most bytes beyond those before an action, by kind at that moment, and what it leaves behind."""
    fewer, *others = shapes_of(records, stage, place)
    if not others:
        return fewer.moments[_largest(fewer.sums)], fewer.net
    (more,), span = others, span_of(records, stage, place)
    found = max(_moments(fewer, more, span), key=sum)
    return tuple(map(round, found)), tuple(map(round, at_blocks(span, (fewer.net, more.net))))


def _largest(sums: Sequence[float]) -> int:
    return max(range(len(sums)), key=sums.__getitem__)


def _moments(fewer: ActionShape, more: ActionShape, span: Span) -> Iterator[tuple[float, ...]]:
    """Yields what an action holds beyond what was held before it, at moments of which one is the peak.

    Until the second block ends as much happens with all blocks as with more, but for the first moment, at which
    gradients of all blocks may be freed. After the last block what is held is affine in their number. The last block
    with more blocks has one before it, so that messages of that one may be under way. It stands for the second block of
    all and for the last; those between hold no more than one of the two.
    """
    low, high, at = span
    front, one_block = fewer.front(more)[0], len(more.moments) - len(fewer.moments)

    def largest(numbers: Sequence[int], later: int) -> tuple[float, ...]:
        """The largest, with all blocks, of moments with fewer, which are so many later with more."""
        sums = at_blocks(span, ([fewer.sums[n] for n in numbers], [more.sums[n + later] for n in numbers]))
        number = numbers[_largest(sums)]
        return at_blocks(span, (fewer.moments[number], more.moments[number + later]))

    numbers = range(len(fewer.moments))
    if at < high or high == low or not one_block:
        for some, later in ((numbers[:front], 0), (numbers[front:], one_block)):
            if some:
                yield largest(some, later)
        return
    until = front + one_block
    is_behind = front < len(fewer.moments)
    ends = at_blocks(span, (fewer.moments[front], more.moments[until]) if is_behind else (fewer.net, more.net))
    first, last = at_blocks(span, (fewer.moments[0], more.moments[0])), more.moments[until if is_behind else -1]
    for start, shift in ((0, map(sub, first, more.moments[0])), (front, map(sub, ends, last))):
        number = start + _largest(more.sums[start:until])
        yield tuple(map(add, more.moments[number], shift))
    if is_behind:
        yield largest(numbers[front:], one_block)
