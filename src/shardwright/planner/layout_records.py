"""``LayoutRecords``: what each action of a layout does in rehearsals with few blocks, and on how many blocks it runs.

:mod:`shardwright.planner.records` makes them; prices, memory and bytes sent are extrapolated from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.cost.operators import OperatorRecord
from shardwright.layout import Layout
from shardwright.plan.schedule import Schedule
from shardwright.planner.extended import RepeatedSpan
from shardwright.planner.moments import front_of
from shardwright.planner.places import ActionClass, ActionOrder, action_orders, nearest_class
from shardwright.planner.rehearse import MessageRecord, StepRecord

UNSTATED = ("core", "loss")
"""Sources of messages that are no strategy's, such as the sum of the loss. No ``traffic`` states their few bytes."""

HeldBytes = tuple[int, ...]
"""Bytes by kind of memory, in the order of :data:`shardwright.ledger.tracking.KINDS`."""


@dataclass(frozen=True, eq=False)
class ActionShape:
    """The operators and messages of one action in program order, and how the bytes held change during it.

    ``moments`` has the bytes held less those held before the action, by kind of memory: an entry after each operator
    that allocates memory, and one at the end of the action.
    """

    records: tuple[StepRecord, ...]
    moments: tuple[HeldBytes, ...]
    _fronts: dict[ActionShape, tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def net(self) -> HeldBytes:
        """The change in bytes held from before the action to its end, by kind of memory; () if nothing is known."""
        return self.moments[-1] if self.moments else ()

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """For each moment, the change in bytes held, added up over the kinds of memory."""
        return tuple(map(sum, self.moments))

    @cached_property
    def flops(self) -> int:
        """The FLOPs of the operators."""
        return sum(record.flops for record in self.records if isinstance(record, OperatorRecord))

    @cached_property
    def sent_bytes(self) -> Mapping[str, int]:
        """The payload bytes of the messages by axis of the mesh, without those of sources in :data:`UNSTATED`."""
        sent: Counter[str] = Counter()
        for record in self.records:
            if isinstance(record, MessageRecord) and record.source not in UNSTATED:
                sent[record.axis] += record.num_bytes
        return sent

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """The payload bytes of the messages to the next pipeline stage, one number for each message in their order."""
        return tuple(send.num_bytes for send in self.records if isinstance(send, MessageRecord) and send.kind == "send")

    def front(self, more: ActionShape) -> tuple[int, int]:
        """Returns :func:`front_of` for the moments of this action and of the same one with more blocks."""
        if more not in self._fronts:
            self._fronts[more] = front_of(self.moments, more.moments)
        return self._fronts[more]


class StageRecord(NamedTuple):
    """One rehearsal of a stage: the number of blocks in each of its chunks, and what each class of its actions does.

    ``num_blocks`` is () if the stage was rehearsed with all its blocks. ``num_microbatches`` is that of the rehearsal.
    ``base`` has the bytes held before the step, by kind of memory. ``update`` is what follows the actions: the end of
    the gradient sync, and the optimizer's step. ``beside`` has the bytes held beside tensors, by purpose, and
    ``offloaded_bytes`` those of parameters and optimizer state in host memory or on disk.
    """

    num_blocks: tuple[int, ...]
    num_microbatches: int
    base: HeldBytes
    actions: Mapping[ActionClass, ActionShape]
    update: ActionShape
    beside: Mapping[str, int]
    offloaded_bytes: int = 0

    def sends(self, slot: int) -> set[tuple[int, ...]]:
        """Returns what forwards of the chunk ``slot`` send to the next stage, as tuples of the bytes of each message.

        Forwards that send the same are one entry of the set.
        """
        return {shape.sends for place, shape in self.actions.items() if place[:2] == (slot, "F")}


class StageRecords(NamedTuple):
    """Two rehearsals (steps on the meta device) of a stage, with fewer and with more blocks, to extrapolate from.

    ``more`` is None if the stage was rehearsed once, with all its blocks.
    """

    fewer: StageRecord
    more: StageRecord | None

    @property
    def rehearsed(self) -> tuple[StageRecord, ...]:
        """The rehearsals that were made: both, or ``fewer`` alone if it has all blocks of the stage."""
        return (self.fewer,) if self.more is None else (self.fewer, self.more)

    def span(self, blocks: Sequence[int], slot: int | None = None) -> RepeatedSpan:
        """Returns the numbers of blocks in the two rehearsals, and in a stage whose chunks have ``blocks``.

        They are those of the chunk number ``slot`` of the stage, or the sums over its chunks without a ``slot``. All
        are 0 if the stage was rehearsed with all its blocks.
        """
        if self.more is None:
            return 0, 0, 0
        few, more = self.fewer.num_blocks, self.more.num_blocks
        return (sum(few), sum(more), sum(blocks)) if slot is None else (few[slot], more[slot], blocks[slot])


@dataclass(frozen=True)
class LayoutRecords:
    """All that pricing needs of a layout: its schedule, and the rehearsals and blocks of each stage.

    ``num_blocks`` has, for each stage, the number of repeated blocks in each of its chunks: () for a stage that was
    rehearsed with all its blocks. ``num_rehearsals`` is the number of rehearsals, each of one stage.
    """

    layout: Layout
    schedule: Schedule = field(repr=False)
    stages: tuple[StageRecords, ...] = field(repr=False)
    num_blocks: tuple[tuple[int, ...], ...] = field(repr=False)
    num_rehearsals: int
    has_narrow_sums: bool = False
    """Whether gradients of several microbatches are summed in bf16 or fp16, as autograd leaves them."""
    note: str = ""
    """Text on why the layout was rehearsed with all its stages and blocks; "" if it was not."""

    @cached_property
    def action_orders(self) -> tuple[ActionOrder, ...]:
        """For each stage its actions in order, each as its :class:`ActionClass`.

        A rehearsed action of the same class, or of the most similar one, stands for it in prices.
        """
        return action_orders(self.schedule)

    @cached_property
    def step(self) -> ActionTable:
        """The table of what all stages do in a step, with equal actions listed once; prices are computed from it."""
        return _step_actions(self)


class ActionRehearsal(NamedTuple):
    """One action of a stage, or its optimizer's step, as it was rehearsed, and the numbers of blocks it runs.

    ``fewer`` and ``more`` are what it does with fewer and with more blocks, one and the same if the stage was rehearsed
    with all its blocks. ``is_last`` says that no action of the schedule follows it, as with the optimizer's step.
    """

    fewer: ActionShape
    more: ActionShape
    span: RepeatedSpan
    is_update: bool
    is_last: bool


@dataclass(frozen=True)
class ActionTable:
    """What all stages of a pipeline do in a step: the different actions, and how often each stage runs each of them."""

    actions: tuple[ActionRehearsal, ...]
    of_stage: tuple[tuple[int, ...], ...]
    """For each stage, the index in ``actions`` of each class of its :class:`ActionOrder`, and of its optimizer's step
    at the end."""
    times: npt.NDArray[np.int64]
    """How often each stage (rows) runs each of ``actions`` (columns) in a step."""

    def at_blocks(self, fewer: Sequence[Sequence[float]], more: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
        """Returns a row of numbers, such as seconds or bytes, for each of ``actions``, with all blocks that it runs.

        ``fewer`` and ``more`` have the rows of the rehearsals with fewer and with more blocks, from which the numbers
        are extrapolated linearly.
        """
        few, beyond, apart = np.array(fewer, dtype=np.float64), *self._spans
        return few + (np.array(more, dtype=np.float64) - few) * beyond / apart

    @cached_property
    def _spans(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """By how many blocks each action exceeds the rehearsal with fewer, and by how many the two rehearsals differ.

        Both are columns with a row for each action: 0 and 1 for an action that is not extrapolated.
        """
        low, high, at = (
            np.array([action.span for action in self.actions], dtype=np.float64).reshape(-1, 3).T[:, :, None]
        )
        return np.where(high == low, 0, at - low), np.where(high == low, 1, high - low)


def _step_actions(records: LayoutRecords) -> ActionTable:
    """Returns the actions of all stages; those with the same rehearsal and as many blocks share one entry."""
    numbers: dict[tuple[int, int, bool], int] = {}
    actions, of_stage = list[ActionRehearsal](), list[tuple[int, ...]]()
    of_kind: dict[tuple[object, ...], tuple[int, ...]] = {}  # stages with the same blocks and classes share an entry

    def number(action: ActionRehearsal) -> int:
        key = id(action.fewer), action.span[-1], action.is_last
        if key not in numbers:
            numbers[key] = len(actions)
            actions.append(action)
        return numbers[key]

    def numbers_of(kind: StageRecords, blocks: tuple[int, ...], classes: tuple[ActionClass, ...]) -> Iterator[int]:
        fewer, more = kind.fewer, kind.fewer if kind.more is None else kind.more
        for place in classes:
            known = nearest_class(place, fewer.actions)
            assert known is not None, "checked when the layout was recorded"
            span, is_last = kind.span(blocks, place.slot), not place.before
            yield number(ActionRehearsal(fewer.actions[known], more.actions[known], span, False, is_last))
        yield number(ActionRehearsal(fewer.update, more.update, kind.span(blocks), True, True))

    for kind, blocks, order in zip(records.stages, records.num_blocks, records.action_orders, strict=True):
        key = id(kind.fewer), blocks, order.classes
        if key not in of_kind:
            of_kind[key] = tuple(numbers_of(kind, blocks, order.classes))
        of_stage.append(of_kind[key])
    counts = (np.bincount(own, (*order.counts, 1), len(actions))
              for own, order in zip(of_stage, records.action_orders, strict=True))  # fmt: skip
    times = np.array([*counts]).astype(np.int64)
    return ActionTable(tuple(actions), tuple(of_stage), times)
