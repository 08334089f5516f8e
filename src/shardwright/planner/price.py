"""Computes the price of a layout on a cluster: the seconds of its step by part, each stage's memory, and bytes sent.

The operators and messages of an action are walked in program order. The collectives of one axis are taken to run one
after the other; the time that a rank waits for one without computing is exposed. The seconds of each part grow linearly
with the blocks, so they are extrapolated to all blocks of the stage; then the schedule is simulated. Nothing is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shardwright.axes import layout_axes, mesh_axes
from shardwright.cost.cluster import Cluster
from shardwright.cost.operators import MESSAGE_STARTS, PARTS, OperatorRecord, operator_s, smooth_max
from shardwright.devices import HOST
from shardwright.layout import Layout
from shardwright.mesh import Mesh
from shardwright.plan.schedule import Schedule
from shardwright.planner.extended import at_blocks
from shardwright.planner.layout_records import ActionShape, ActionTable, LayoutRecords
from shardwright.planner.memory import StageMemory, memory_by_stage
from shardwright.planner.rehearse import P2P, MessageRecord
from shardwright.runtime.timeline import Timeline
from shardwright.strategies.pipeline.simulate import ChunkTimes, ends_of, simulate

MOVED_SHARE = 1 / 3
"""The share of the offloaded bytes that moves each way in a step: gradients to the host, and parameters back. It is a
third, since beside each parameter the host holds two moments of its size."""

UTILISATION = 0.4
"""The share of the peak FLOP/s that a baseline takes every layout to reach."""

LEFT = 0.92
"""The share of a device's memory that a layout may take by default."""


class Price(NamedTuple):
    """The predicted cost of a layout on a cluster.

    ``waterfall`` has the seconds of a step by part, such as matrix products or exposed messages of a layout axis, on
    the stage that finishes last, and adds up to ``step_s``. ``bubble`` is the share of all stages' time in which they
    wait, from the first action of the schedule to the last; the bubble in ``waterfall`` is the waiting of the stage
    that finishes last alone. ``memory`` is the peak of each stage. ``traffic_by_axis`` has, by mesh axis, the payload
    bytes that a rank sends and receives in a step, of the stage with the most of them. The few bytes of the loss and of
    comparisons between ranks are left out.
    """

    layout: Layout
    step_s: float
    waterfall: Mapping[str, float]
    bubble: float
    memory: tuple[StageMemory, ...]
    traffic_by_axis: Mapping[str, int]
    flops: float
    """The FLOPs of one rank's step, as the mean over stages: three times those of its forwards."""
    records: LayoutRecords
    starts: float = 0.0
    """The number of operators that the host launches in a step for one rank of the pipeline stage that ends last.

    A message on an accelerator counts as ``MESSAGE_STARTS`` operators.
    """

    def __repr__(self) -> str:
        return f"Price({self.layout}, {self.step_s:.3g} s, {self.memory_bytes / 1e9:.3g} GB)"

    @property
    def memory_bytes(self) -> int:
        """The most bytes of device memory that any rank takes."""
        return max(memory.num_bytes for memory in self.memory)

    def fits(self, memory_bytes: float, limit: float = LEFT) -> bool:
        """Returns whether every rank takes at most the share ``limit`` of a device's ``memory_bytes``."""
        return self.memory_bytes <= memory_bytes * limit


@dataclass(frozen=True)
class ActionTime:
    """The seconds of one action of a schedule by part: operators, then exposed messages.

    ``parts`` has the operators' seconds in the order of ``PARTS``, followed by the messages' in the order of ``axes``.
    ``launches`` counts the operators that the host starts; a message on an accelerator counts as several.
    """

    parts: tuple[float, ...]
    launches: float
    axes: tuple[str, ...]
    messages_s: float = 0.0
    """The seconds of all messages, exposed or not."""

    def waterfall(self, launch_s: float, *, on_host: bool = False, factor: float = 1.0) -> dict[str, float]:
        """Returns the seconds of the action by the name of the part.

        "launch" is the time by which the host's starts of operators, ``launch_s`` each, make the action longer: all of
        it with ``on_host``, where the host computes too. ``factor`` is how many times as long operators take together
        as alone.
        """
        operators = [seconds * factor for seconds in self.parts[: len(PARTS)]]
        device_s, started_s = sum(operators), self.launches * launch_s
        by_part = dict(zip(PARTS, operators, strict=True))
        by_part["launch"] = started_s if on_host else smooth_max(device_s, started_s) - device_s
        return {**by_part, **dict(zip(self.axes, self.parts[len(PARTS) :], strict=True))}


class PassTimes(NamedTuple):
    """The seconds of a microbatch's passes on a layout of one stage, of the parts of them, and of the optimizer's step.

    ``weights_s`` is the part of ``backward_s`` that computes gradients of weights, taken to be half of its matrix
    products, and ``adds_s`` how much longer the backward of a later microbatch takes, which adds its gradients; 0 if
    there is one microbatch. ``update_starts_s`` are those in which the host starts the optimizer's operators, a part of
    ``update_s`` that does not shrink with the state. ``hidden_s`` are those of the backward's messages that computation
    hides. Exposed messages of model copies are not counted. ``flops`` are those of the forward.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    adds_s: float
    update_s: float
    update_starts_s: float
    hidden_s: float
    flops: float


class Pricing:
    """Computes the prices of layouts on one cluster, and caches the seconds of operators, messages and actions.

    ``block`` names the class of the model's repeated blocks, for which the cluster may have a measured factor.
    """

    def __init__(self, cluster: Cluster, block: str = "") -> None:
        self.cluster = cluster
        self.factor = cluster.calibration.blocks.get(block, 1.0)
        """How many times as long the operators of a step take together as each alone; 1 if it was not measured."""
        self.on_host = cluster.device.type in HOST
        self._operators: dict[OperatorRecord, float] = {}
        self._messages: dict[tuple[object, ...], float] = {}
        self._actions: dict[tuple[int, bool], tuple[ActionShape, ActionTime]] = {}
        self._axes = (*layout_axes(),)
        self._of_mesh = {mesh: name for name, axis in layout_axes().items() for mesh in axis.all_mesh_axes}

    def price(self, layout: Layout, records: LayoutRecords) -> Price:
        """Returns the price of a layout, computed from its records: what each action of each stage does."""
        schedule = records.schedule
        stages, times = self._times(layout, records)
        sent, unsent = ends_of(schedule, times, replace(times, transfer_s=0.0))
        ends = [end_s + stage.rest_s for end_s, stage in zip(sent.ends_s, stages, strict=True)]
        last = max(range(len(ends)), key=ends.__getitem__)
        waterfall: dict[str, float] = stages[last].waterfall()
        bubble_s = unsent.ends_s[last] - unsent.busy_s[last]
        pipeline = next((name for name, axis in layout_axes().items() if axis.kind == "stages"), "pp")
        waterfall[pipeline] = waterfall.get(pipeline, 0.0) + sent.ends_s[last] - unsent.ends_s[last]
        waterfall["bubble"] = bubble_s
        waterfall["other"] = self.cluster.constants.step_s
        step_s = sum(waterfall.values())
        memory = memory_by_stage(records)
        most = max(traffic_by_stage(records), key=lambda traffic: traffic.total())
        flops = sum(stage.forward_flops for stage in stages) * 3 / len(stages)
        return Price(layout, step_s, waterfall, sent.bubble, memory, dict(most), flops, records, stages[last].starts)

    def timeline(self, layout: Layout, records: LayoutRecords) -> Timeline:
        """Returns when each action of a layout's step runs on each pipeline stage, as it is priced.

        Actions of one kind on one chunk are taken to last as long as most of them do. The memory is left out.
        """
        timeline = simulate(records.schedule, self._times(layout, records)[1])
        return replace(timeline, name=f"{layout} on {self.cluster}")

    def _times(self, layout: Layout, records: LayoutRecords) -> tuple[list[_StageTimes], ChunkTimes]:
        """Returns the times of each stage, and the usual seconds of each chunk's actions, to simulate a schedule by."""
        schedule = records.schedule
        stages = self._stage_times(records)
        slots = _slots(schedule)

        def seconds(kind: str) -> tuple[float, ...]:
            return tuple([stages[stage].usual_s(slot, kind) for stage, slot in slots])

        # where a chunk has whole and split backwards, a whole one is simulated as its two parts
        inputs = tuple(i or b for b, i in zip(seconds("B"), seconds("I"), strict=True))
        return stages, ChunkTimes(seconds("F"), inputs, seconds("W"), self._transfers(records, layout.mesh))

    def _stage_times(self, records: LayoutRecords) -> list[_StageTimes]:
        costs = self._costs(records.step)
        return [_StageTimes(self, records, stage, costs) for stage in range(records.schedule.num_stages)]

    def pass_times(self, records: LayoutRecords) -> PassTimes:
        """Returns the seconds of the passes of a layout of one stage, extrapolated to all its blocks."""
        (stage,) = self._stage_times(records)
        copies = [name for name, axis in layout_axes().items() if axis.kind == "copies"]

        def seconds(cost: _ActionCost) -> float:
            return cost.seconds - sum(cost.parts[axis] for axis in copies)

        (forward, *_), (first, *later) = (stage.costs_of(kind) for kind in "FB")
        waterfall = stage.waterfall()
        exposed_s = sum(first.parts[axis] for axis in self._axes)
        adds_s = max(0.0, seconds(later[0]) - seconds(first)) if later else 0.0
        return PassTimes(
            seconds(forward), seconds(first), first.parts[PARTS[0]] / 2, adds_s, waterfall["optimizer"],
            stage.update_starts_s, max(0.0, first.messages_s - exposed_s), forward.flops,
        )  # fmt: skip

    # ---- actions

    def action_time(self, shape: ActionShape, *, is_last: bool) -> ActionTime:
        """Returns the seconds of an action by part.

        ``is_last`` says that no action of the schedule follows it, so that messages still under way at its end are
        waited for.
        """
        key = (id(shape.records), is_last)
        if key not in self._actions:
            self._actions[key] = (shape, self._walk(shape, is_last=is_last))
        return self._actions[key][1]

    def _walk(self, shape: ActionShape, *, is_last: bool) -> ActionTime:
        parts, exposed = dict.fromkeys(PARTS, 0.0), dict.fromkeys(self._axes, 0.0)
        clock, launches, sent_s, overlap_cost = 0.0, 0, 0.0, self.cluster.constants.overlap_cost
        ends: dict[int, tuple[str, float, float]] = {}
        free: dict[str, float] = {}

        def waited(axis: str, end: float, message_s: float) -> None:
            nonlocal clock
            left_s = max(0.0, end - clock)
            lost_s = left_s + overlap_cost * max(0.0, message_s - left_s)
            exposed[axis] += lost_s
            clock += lost_s

        for number, record in enumerate(shape.records):
            if isinstance(record, OperatorRecord):
                seconds = self.operator_s(record)
                parts[record.part] += seconds
                clock += seconds
                launches += record.launches
            elif isinstance(record, MessageRecord):
                launches += 0 if self.on_host else MESSAGE_STARTS  # where the host computes, message_s includes them
                if record.kind not in P2P:
                    message_s = self.message_s(record)
                    sent_s += message_s
                    end = max(clock, free.get(record.axis, 0.0)) + message_s
                    free[record.axis] = end
                    ends[number] = (self.axis_of(record.axis), end, message_s)
            elif record.began in ends:
                waited(*ends.pop(record.began))
        for axis, end, message_s in ends.values():  # a message still under way is waited for after the last action only
            waited(axis, end if is_last else clock, message_s)
        return ActionTime((*parts.values(), *exposed.values()), launches, self._axes, sent_s)

    def _costs(self, step: ActionTable) -> list[_ActionCost]:
        """Returns the cost of each action of ``step``, extrapolated to all blocks that it runs."""
        constants, calibration = self.cluster.constants, self.cluster.calibration

        def rows(shapes: Iterable[ActionShape]) -> list[tuple[float, ...]]:
            times = ((shape, self.action_time(shape, is_last=rehearsal.is_last))
                     for shape, rehearsal in zip(shapes, step.actions, strict=True))  # fmt: skip
            return [(*time.parts, time.launches, time.messages_s, float(shape.flops)) for shape, time in times]

        fewer, more = (
            rows(rehearsal.fewer for rehearsal in step.actions),
            rows(rehearsal.more for rehearsal in step.actions),
        )
        numbers = step.at_blocks(fewer, more)
        # exposed seconds of messages are not linear in the blocks: where the rehearsal with more blocks exposes less,
        # its seconds are taken as they are, since an extrapolation may fall below zero
        exposed = slice(len(PARTS), -3)
        few, many = np.array(fewer)[:, exposed], np.array(more)[:, exposed]
        numbers[:, exposed] = np.where(many >= few, numbers[:, exposed], many)
        costs = []
        for action, (*parts, launches, messages_s, flops) in zip(step.actions, numbers.tolist(), strict=True):
            factor = calibration.blocks.get("optimizer", 1.0) if action.is_update else self.factor
            launch_s = constants.update_launch_s if action.is_update else constants.launch_s
            time = ActionTime(tuple(parts), launches, self._axes, messages_s)
            by_part = time.waterfall(launch_s, on_host=self.on_host, factor=factor)
            costs.append(_ActionCost(by_part, sum(by_part.values()), flops, launches, messages_s))
        return costs

    def operator_s(self, record: OperatorRecord) -> float:
        """Returns the seconds of one operator on the cluster's device."""
        if record not in self._operators:
            cluster = self.cluster
            factors = cluster.calibration.operators
            self._operators[record] = operator_s(record, cluster.device, cluster.constants, factors)
        return self._operators[record]

    def together_s(self, operators_s: float, launches: float) -> float:
        """Returns the seconds of several operators in a row, launches by the host included.

        One by one, the operators take ``operators_s`` seconds without launches. The two are put together as in
        :meth:`ActionTime.waterfall`.
        """
        time = ActionTime((operators_s, *(0.0 for _ in PARTS[1:])), launches, ())
        seconds = time.waterfall(self.cluster.constants.launch_s, on_host=self.on_host, factor=self.factor)
        return sum(seconds.values())

    def message_s(self, record: MessageRecord) -> float:
        """Returns the seconds of one message over the cluster's links."""
        return self._message_s(record.kind, record.num_bytes, record.ranks)

    def _message_s(self, *key: Any) -> float:
        if key not in self._messages:
            self._messages[key] = self.cluster.message_s(*key)
        return self._messages[key]

    def axis_of(self, name: str) -> str:
        """Returns the layout axis under which the time of messages on the mesh axis ``name`` is counted.

        A joined name such as ``dp+tp`` counts as its first mesh axis, the slowest. A name that is no mesh axis, such as
        "world", counts as the first layout axis.
        """
        return self._of_mesh.get(name.partition("+")[0], self._axes[0])

    # ---- messages

    def _transfers(self, records: LayoutRecords, mesh: Mesh) -> float | dict[tuple[int, int], float]:
        """Returns the seconds from the end of a forward to the arrival of what it sends, by pair of stages; or 0."""
        transfers: dict[tuple[int, int], float] = {}
        schedule = records.schedule
        first_of = [mesh.first_rank(mesh_axes("stages"), stage) for stage in range(schedule.num_stages)]
        for (stage, slot), (target, _) in pairwise(_slots(schedule)):
            ranks, kind = (first_of[stage], first_of[target]), records.stages[stage].fewer
            for sends in kind.sends(slot) if stage != target else ():
                seconds = sum(self._message_s("send", num_bytes, ranks) for num_bytes in sends)
                transfers[stage, target] = max(transfers.get((stage, target), 0.0), seconds)
        return transfers or 0.0


def _slots(schedule: Schedule) -> list[tuple[int, int]]:
    """Returns the stage of each chunk, and the number of the chunk on its stage."""
    num_slots, slots = [0] * schedule.num_stages, []
    for stage in schedule.stage_of:
        slots.append((stage, num_slots[stage]))
        num_slots[stage] += 1
    return slots


def traffic_by_stage(records: LayoutRecords) -> list[Counter[str]]:
    """Returns, for each stage, the payload bytes of all messages of a rank's step, by axis of the mesh.

    The few bytes of the loss and of comparisons between ranks are left out.
    """
    step = records.step
    axes = [
        *dict.fromkeys(
            axis for action in step.actions for axis in sorted({*action.fewer.sent_bytes, *action.more.sent_bytes})
        )
    ]

    def rows(shapes: Iterable[ActionShape]) -> list[list[int]]:
        return [[shape.sent_bytes.get(axis, 0) for axis in axes] for shape in shapes]

    sent = step.at_blocks(rows(action.fewer for action in step.actions), rows(action.more for action in step.actions))
    by_action = step.times[:, :, None] * sent
    totals = np.rint(by_action).sum(axis=1).astype(np.int64).tolist()
    return [+Counter(dict(zip(axes, sizes, strict=True))) for sizes in totals]


class _ActionCost(NamedTuple):
    """What one action takes on a stage with all its blocks: seconds by part and in all, FLOPs, operators started.

    ``messages_s`` are the seconds of its messages, whether they are hidden behind operators or not.
    """

    parts: Mapping[str, float]
    seconds: float
    flops: float
    starts: float
    messages_s: float


class _StageTimes:
    """The seconds of one stage's actions; ``costs`` are those of the actions of all stages."""

    def __init__(self, pricing: Pricing, records: LayoutRecords, stage: int, costs: Sequence[_ActionCost]) -> None:
        self._pricing, self._kind = pricing, records.stages[stage]
        self._blocks, order = records.num_blocks[stage], records.action_orders[stage]
        *own, update = (costs[number] for number in records.step.of_stage[stage])
        self._places, self._costs, self._counts = order.classes, own, order.counts
        usual: dict[tuple[int, str], tuple[tuple[int, bool], float]] = {}
        done_s, self.starts, self.forward_flops = 0.0, update.starts, 0.0
        numbers = Counter[tuple[int, str]]()
        for place, cost, number in zip(order.classes, own, order.counts, strict=True):
            key, rank = place[:2], (number, place.order == "between")
            if key not in usual or rank >= usual[key][0]:  # the most frequent class; of equal ones "between", the last
                usual[key] = rank, cost.seconds
            numbers[key] += number
            done_s += number * cost.seconds
            self.starts += number * cost.starts
            self.forward_flops += number * cost.flops if place.kind == "F" else 0.0
        self._usual = {key: seconds for key, (_, seconds) in usual.items()}
        self._update_s = self._offloaded_update_s() or update.seconds
        self.update_starts_s = update.starts * pricing.cluster.constants.update_launch_s
        usual_s = sum(number * self._usual[key] for key, number in numbers.items())
        self.rest_s = done_s - usual_s + self._update_s

    def waterfall(self) -> dict[str, float]:
        """Returns the seconds of the stage's step by part."""
        by_part: dict[str, float] = {}
        for cost, number in zip(self._costs, self._counts, strict=True):
            for name, s in cost.parts.items():
                by_part[name] = by_part.get(name, 0.0) + number * s
        return {**by_part, "optimizer": self._update_s}

    def _offloaded_update_s(self) -> float:
        """Returns the seconds of the optimizer's step where the host makes it; 0 if the device does.

        Gradients go to the host, parameters come back, and the host reads and writes the bytes of the operators.
        """
        rehearsals = self._kind.rehearsed
        if self._pricing.on_host or not any(stage_record.offloaded_bytes for stage_record in rehearsals):
            return 0.0
        counts = []
        for rehearsal in rehearsals:
            operators = [record for record in rehearsal.update.records if isinstance(record, OperatorRecord)]
            starts, moved = sum(record.launches for record in operators), sum(record.num_bytes for record in operators)
            counts.append([float(rehearsal.offloaded_bytes), float(moved), float(starts)])
        offloaded_bytes, read, launches = at_blocks(self._kind.span(self._blocks), counts)
        device, constants = self._pricing.cluster.device, self._pricing.cluster.constants
        link = device.host_bytes_per_s * constants.host_link_efficiency
        return (
            2 * offloaded_bytes * MOVED_SHARE / link
            + read / constants.host_update_bytes_per_s
            + (launches * constants.update_launch_s)
        )

    def costs_of(self, kind: str) -> list[_ActionCost]:
        """Returns the cost of each class of the stage's actions of a kind, in their order."""
        return [cost for place, cost in zip(self._places, self._costs, strict=True) if place.kind == kind]

    def usual_s(self, slot: int, kind: str) -> float:
        """Returns the seconds of the most frequent class of actions of a kind on a chunk; 0 if there is none."""
        return self._usual.get((slot, kind), 0.0)
