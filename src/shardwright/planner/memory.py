"""Predicts the peak memory of each pipeline stage over a step, from what its actions allocate in rehearsals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.ledger.tracking import KINDS
from shardwright.planner.extended import RepeatedSpan, at_blocks
from shardwright.planner.layout_records import ActionRehearsal, ActionShape, ActionTable, HeldBytes, LayoutRecords


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
    step, orders = records.step, records.action_orders
    most, net = np.array([_most(action) for action in step.actions], dtype=np.int64), _net(step)
    indices = [np.array(row) for row in step.of_stage]
    actions = np.concatenate([np.append(row[order.order], row[-1]) for row, order in zip(indices, orders, strict=True)])
    begins = [*accumulate((len(order.order) + 1 for order in orders), initial=0)]
    changes = net.sum(axis=1)[actions]
    # counted from before the step of stage 0: only differences within a stage are used
    held_bytes = np.cumsum(changes) - changes + most.sum(axis=1)[actions]
    peaks, bases = list[StageMemory](), dict[object, tuple[npt.NDArray[np.int64], int]]()
    for stage, (kind, blocks) in enumerate(zip(records.stages, records.num_blocks, strict=True)):
        key = id(kind.fewer), blocks
        if key not in bases:
            bases[key] = np.array(_base(records, stage)), beside_bytes(records, stage)
        base, beside = bases[key]
        numbers = actions[begins[stage] : begins[stage + 1]]
        at = held_bytes[begins[stage] : begins[stage + 1]].argmax()  # the first one, of equal peaks
        peak = np.bincount(numbers[:at], minlength=len(net)) @ net + most[numbers[at]]
        by_kind = base + peak if peak.sum() > 0 else base
        peaks.append(StageMemory(dict(zip(KINDS, by_kind.tolist(), strict=True)), beside))
    return tuple(peaks)


def _net(step: ActionTable) -> npt.NDArray[np.int64]:
    """Returns by how many bytes each action (rows) changes what a rank holds of each kind of memory (columns)."""
    net = step.at_blocks([action.fewer.net for action in step.actions], [action.more.net for action in step.actions])
    return np.rint(net).astype(np.int64)


def offloaded_bytes(records: LayoutRecords) -> int:
    """Returns the bytes of parameters and optimizer state that are offloaded, of the rank that offloads the most."""
    sizes = [0]
    for kind, blocks in zip(records.stages, records.num_blocks, strict=True):
        (size,) = at_blocks(kind.span(blocks), [[float(rehearsal.offloaded_bytes)] for rehearsal in kind.rehearsed])
        sizes.append(round(size))
    return max(sizes)


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

    ``kept`` is what the forward keeps for the backward, ``most`` the peak over both passes, and ``update`` the peak of
    the optimizer's step.
    """

    kept: float
    most: float
    update: float


def pass_memory(records: LayoutRecords, stage: int) -> PassMemory:
    """Returns the memory of a microbatch's passes on a stage's first chunk, extrapolated to the chunk's blocks.

    It is that of the second microbatch, of three or more. There gradients exist already, so that none are allocated,
    and they are not complete, so that the sums over ranks that wait for the last microbatch do not begin.
    """
    actions, net = records.step.actions, _net(records.step).sum(axis=1).tolist()
    *own, update = records.step.of_stage[stage]
    kinds = [place.kind for place in records.action_orders[stage].classes]
    forward, backward = ([n for n, letter in zip(own, kinds, strict=True) if letter == kind][:2][-1] for kind in "FB")
    most, later, updated = (sum(_most(actions[index])) for index in (forward, backward, update))
    kept = net[forward]
    return PassMemory(max(0, kept), max(most, kept + later, 0), max(0, updated))


def beside_bytes(records: LayoutRecords, stage: int) -> int:
    """Returns the bytes that a stage's rank holds beside tensors: cuBLAS workspace and NCCL buffers."""
    return sum(size for name, size in records.stages[stage].fewer.beside.items() if name in ("workspace", "nccl"))


def _base(records: LayoutRecords, stage: int) -> HeldBytes:
    kind = records.stages[stage]
    rehearsed = [rehearsal.base for rehearsal in kind.rehearsed]
    base = tuple(map(round, at_blocks(kind.span(records.num_blocks[stage]), rehearsed)))
    batch, number = KINDS.index("batch"), records.schedule.num_microbatches
    return (*base[:batch], base[batch] * number // kind.fewer.num_microbatches, *base[batch + 1 :])


def _most(action: ActionRehearsal) -> HeldBytes:
    """Returns the bytes by kind, beyond those held before an action, at the action's moment of most memory."""
    fewer, more = action.fewer, action.more
    if fewer is more:
        return fewer.moments[_largest(fewer.sums)]
    return tuple(map(round, max(_moments(fewer, more, action.span), key=sum)))


def _largest(sums: Sequence[float]) -> int:
    return max(range(len(sums)), key=sums.__getitem__)


def _moments(fewer: ActionShape, more: ActionShape, span: RepeatedSpan) -> Iterator[tuple[float, ...]]:
    """Yields the bytes by kind that an action with all blocks adds to those held before it, at moments of high memory.

    One of these moments is the peak. They are found from the rehearsals with fewer and with more blocks:

    - Up to the end of the added block (the last one of the rehearsal with more), an action with all blocks does the
      same as that rehearsal. Only its first moment may differ, as where it frees the gradients of all blocks, and later
      moments are shifted by that difference.
    - The last of all blocks is taken to be like the added block: its moments are shifted to what is held at its end.
      Both have a block before them, whose messages may be under way. Blocks between hold no more than one of the two.
    - After the last block, what is held is linear in the number of blocks, and is extrapolated.

    Without moments of an added block, and for fewer blocks than the rehearsal with more has, the largest moments before
    and after ``front`` are extrapolated instead.
    """
    low, high, at = span
    front, one_block = fewer.front(more)[0], len(more.moments) - len(fewer.moments)

    def largest(numbers: Sequence[int], later: int) -> tuple[float, ...]:
        """Returns the largest, with all blocks, of the moments ``numbers`` of ``fewer``.

        In ``more`` each of them is ``later`` moments later.
        """
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
