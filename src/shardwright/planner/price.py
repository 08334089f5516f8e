"""Computes the price of a layout on a cluster: the seconds of its step by part, each stage's memory, and bytes sent.

The operators and messages of an action are gone through in program order. The collectives of one axis are taken to run
one after the other; time that a rank waits for one without computing is exposed. The seconds of each part grow linearly
with the blocks, so they are extrapolated to all blocks of the stage; then the schedule is simulated. Nothing is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.axes import layout_axes, mesh_axes
from shardwright.cost.cluster import Cluster
from shardwright.cost.operators import PARTS, OperatorRecord, operator_s, smooth_max
from shardwright.devices import HOST
from shardwright.layout import Layout
from shardwright.mesh import Mesh
from shardwright.planner.extended import at_blocks, shapes_of, span_of
from shardwright.planner.memory import StageMemory, memory_by_stage
from shardwright.planner.places import ActionClass
from shardwright.planner.records import ActionShape, LayoutRecords, StageRecords
from shardwright.planner.rehearse import P2P, MessageRecord
from shardwright.runtime.timeline import Timeline
from shardwright.strategies.pipeline.simulate import ChunkTimes, simulate

MOVED_SHARE = 1 / 3
"""The share of offloaded bytes that goes to the host as gradients, and comes back as parameters: beside each parameter
the host holds two moments of its size."""

UNSTATED = ("core", "loss")
"""Sources of messages of a few bytes, such as the sum of the loss, which no strategy's ``traffic`` states."""

LEFT = 0.92
"""The share of a device's memory that a layout may take by default."""


class Price(NamedTuple):
    """The predicted cost of a layout on a cluster.

    ``waterfall`` has the seconds of a step by part, such as matrix products or exposed messages of a layout axis, on
    the stage that finishes last, and adds up to ``step_s``. ``bubble`` is the share of all stages' time in which they
    wait, from the first action of the schedule to the last; the waterfall's is that of the last stage alone, which may
    wait for nothing. ``memory`` is the peak of each stage. ``traffic_by_axis`` has, by mesh axis, the payload bytes
    that a rank sends and receives in a step, of the stage with the most of them. The few bytes of the loss and of
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

    @property
    def memory_bytes(self) -> int:
        """The most bytes of device memory that any rank takes."""
        return max(each.num_bytes for each in self.memory)

    def fits(self, memory_bytes: float, limit: float = LEFT) -> bool:
        """Returns whether every rank takes at most the share ``limit`` of a device's ``memory_bytes``."""
        return self.memory_bytes <= memory_bytes * limit


@dataclass(frozen=True)
class ActionTime:
    """The seconds of one action of a schedule by part: operators, then exposed messages.

    ``parts`` has the operators' seconds in the order of ``PARTS``, followed by the messages' in the order of ``axes``.
    ``launches`` counts the operators that the host starts.
    """

    parts: tuple[float, ...]
    launches: float
    axes: tuple[str, ...]

    def waterfall(self, launch_s: float, *, on_host: bool = False, factor: float = 1.0) -> dict[str, float]:
        """Returns the seconds of the action by the name of the part.

        "launch" is the time by which the host's starts of operators, ``launch_s`` each, make the action longer: all of
        it with ``on_host``, where the host computes too. ``factor`` is how many times as long operators take together
        as alone.
        """
        operators = [each * factor for each in self.parts[: len(PARTS)]]
        device_s, started_s = sum(operators), self.launches * launch_s
        found = dict(zip(PARTS, operators, strict=True))
        found["launch"] = started_s if on_host else smooth_max(device_s, started_s) - device_s
        return {**found, **dict(zip(self.axes, self.parts[len(PARTS) :], strict=True))}


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
        stages = [_StageTimes(self, records, stage) for stage in range(schedule.num_stages)]
        times = self._chunk_times(layout, records, stages)
        sent, unsent = (simulate(schedule, each) for each in (times, replace(times, transfer_s=0.0)))
        ends = [spans[-1].end_s + stages[stage].rest_s for stage, spans in enumerate(sent.spans)]
        last = max(range(len(ends)), key=ends.__getitem__)
        waterfall: dict[str, float] = dict(stages[last].waterfall)
        alone_s = unsent.spans[last][-1].end_s
        bubble_s = alone_s - unsent.busy_s(last)
        pipeline = next((name for name, axis in layout_axes().items() if axis.kind == "stages"), "pp")
        waterfall[pipeline] = waterfall.get(pipeline, 0.0) + sent.spans[last][-1].end_s - alone_s
        waterfall["bubble"] = bubble_s
        waterfall["other"] = self.cluster.constants.step_s
        step_s = sum(waterfall.values())
        memory = memory_by_stage(records)
        traffic = [traffic_of_stage(records, stage) for stage in range(schedule.num_stages)]
        most = max(traffic, key=lambda each: each.total())
        flops = sum(stage.forward_flops for stage in stages) * 3 / len(stages)
        return Price(layout, step_s, waterfall, sent.bubble, memory, dict(most), flops, records)

    def timeline(self, layout: Layout, records: LayoutRecords) -> Timeline:
        """Returns when each action of a layout's step runs on each pipeline stage, as it is priced.

        Actions of one kind on one chunk are taken to last as long as most of them do. The memory is left out.
        """
        stages = [_StageTimes(self, records, stage) for stage in range(records.schedule.num_stages)]
        found = simulate(records.schedule, self._chunk_times(layout, records, stages))
        return replace(found, name=f"{layout} on {self.cluster}")

    def _chunk_times(self, layout: Layout, records: LayoutRecords, stages: Sequence[_StageTimes]) -> ChunkTimes:
        schedule = records.schedule
        by_chunk = {chunk: (stage, slot) for stage in range(schedule.num_stages)
                    for slot, chunk in enumerate(schedule.chunks_of(stage))}  # fmt: skip

        def seconds(kind: str) -> tuple[float, ...]:
            where = (by_chunk[chunk] for chunk in range(schedule.num_chunks))
            return tuple(stages[stage].usual_s(slot, kind) for stage, slot in where)

        # where a chunk has whole and split backwards, a whole one is simulated as its two parts
        inputs = tuple(i or b for b, i in zip(seconds("B"), seconds("I"), strict=True))
        return ChunkTimes(seconds("F"), inputs, seconds("W"), self._transfers(records, layout.mesh))

    # ---- actions

    def action_time(self, shape: ActionShape, *, is_last: bool) -> ActionTime:
        """Returns the seconds of an action by part.

        ``is_last`` says that the rank does nothing after it, so that messages still under way at its end are waited
        for.
        """
        key = (id(shape.records), is_last)
        if key not in self._actions:
            self._actions[key] = (shape, self._walk(shape, is_last=is_last))
        return self._actions[key][1]

    def _walk(self, shape: ActionShape, *, is_last: bool) -> ActionTime:
        parts, exposed = dict.fromkeys(PARTS, 0.0), dict.fromkeys(self._axes, 0.0)
        clock, launches, overlap_cost = 0.0, 0, self.cluster.constants.overlap_cost
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
                if record.kind not in P2P:
                    message_s = self.message_s(record)
                    end = max(clock, free.get(record.axis, 0.0)) + message_s
                    free[record.axis] = end
                    ends[number] = (self.axis_of(record.axis), end, message_s)
            elif record.began in ends:
                waited(*ends.pop(record.began))
        for axis, end, message_s in ends.values():  # a message still under way is waited for after the last action only
            waited(axis, end if is_last else clock, message_s)
        return ActionTime((*parts.values(), *exposed.values()), launches, self._axes)

    def operator_s(self, record: OperatorRecord) -> float:
        """Returns the seconds of one operator on the cluster's device."""
        if record not in self._operators:
            cluster = self.cluster
            factors = cluster.calibration.operators
            self._operators[record] = operator_s(record, cluster.device, cluster.constants, factors)
        return self._operators[record]

    def together_s(self, operators_s: float, launches: float) -> float:
        """Returns the seconds of operators of the step in a row, which take ``operators_s`` alone, with their starts.

        The parts are those of :meth:`ActionTime.waterfall`.
        """
        time = ActionTime((operators_s, *(0.0 for _ in PARTS[1:])), launches, ())
        seconds = time.waterfall(self.cluster.constants.launch_s, on_host=self.on_host, factor=self.factor)
        return sum(seconds.values())

    def message_s(self, record: MessageRecord) -> float:
        """Returns the seconds of one message over the cluster's links."""
        key = record.kind, record.num_bytes, record.ranks
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
        """Returns the seconds from the end of a forward to the arrival of what it sends, by pair of stages."""
        found: dict[tuple[int, int], float] = {}
        schedule = records.schedule
        for source in range(schedule.num_chunks - 1):
            pair = schedule.stage_of[source], schedule.stage_of[source + 1]
            slot = schedule.chunks_of(pair[0]).index(source)
            ranks = tuple(mesh.first_rank(mesh_axes("stages"), stage) for stage in pair)
            for place, shape in records.stages[pair[0]].fewer.actions.items():
                if place.slot == slot and place.kind == "F" and pair[0] != pair[1]:
                    sent = (r.num_bytes for r in shape.records if isinstance(r, MessageRecord) and r.kind == "send")
                    seconds = sum(self.cluster.message_s("send", num_bytes, ranks) for num_bytes in sent)
                    found[pair] = max(found.get(pair, 0.0), seconds)
        return found or 0.0


def traffic_of_stage(records: LayoutRecords, stage: int) -> Counter[str]:
    """Returns the payload bytes of all messages of a rank's step, by axis of the mesh.

    The few bytes of the loss and of comparisons between ranks are left out.
    """
    kind, total = records.stages[stage], Counter[str]()
    times = Counter(records.places[stage].values())
    for place, number in times.items():
        for axis, size in _bytes(records, kind, stage, place).items():
            total[axis] += round(number * size)
    total.update({axis: round(size) for axis, size in _bytes(records, kind, stage, None).items()})
    return +total


def _bytes(records: LayoutRecords, kind: StageRecords, stage: int, place: ActionClass | None) -> dict[str, float]:
    counts = [_sent_bytes(each) for each in shapes_of(kind, place)]
    axes = sorted({axis for each in counts for axis in each})
    values = at_blocks(span_of(records, stage, place), [[float(each[axis]) for axis in axes] for each in counts])
    return dict(zip(axes, values, strict=True))


def _sent_bytes(shape: ActionShape) -> Counter[str]:
    sent: Counter[str] = Counter()
    for record in shape.records:
        if isinstance(record, MessageRecord) and record.source not in UNSTATED:
            sent[record.axis] += record.num_bytes
    return sent


class _StageTimes:
    """The seconds of one stage's actions, extended to its blocks."""

    def __init__(self, pricing: Pricing, records: LayoutRecords, stage: int) -> None:
        self._pricing, self._records, self._stage = pricing, records, stage
        self._kind = records.stages[stage]
        launch_s, on_host, factor = pricing.cluster.constants.launch_s, pricing.on_host, pricing.factor
        times = Counter(records.places[stage].values())
        by_place = {place: self._time(place) for place in times}
        found = {place: time.waterfall(launch_s, on_host=on_host, factor=factor) for place, time in by_place.items()}
        seconds = {place: sum(each.values()) for place, each in found.items()}
        self._usual: dict[tuple[int, str], float] = {}
        for place in sorted(times, key=lambda each: (times[each], each.order == "between")):
            self._usual[place.slot, place.kind] = seconds[place]  # the commonest one, which comes last
        self.waterfall: dict[str, float] = {}
        for place, number in times.items():
            for name, s in found[place].items():
                self.waterfall[name] = self.waterfall.get(name, 0.0) + number * s
        factor = pricing.cluster.calibration.blocks.get("optimizer", 1.0)
        update_launch_s = pricing.cluster.constants.update_launch_s
        update = self._time(None).waterfall(update_launch_s, on_host=on_host, factor=factor)
        self.waterfall["optimizer"] = self._offloaded_update_s() or sum(update.values())
        done_s = sum(number * seconds[place] for place, number in times.items())
        usual_s = sum(number * self._usual[place.slot, place.kind] for place, number in times.items())
        self.rest_s = done_s - usual_s + self.waterfall["optimizer"]
        self.forward_flops = sum(number * self._flops(place) for place, number in times.items() if place.kind == "F")

    def _offloaded_update_s(self) -> float:
        """Returns the seconds of the optimizer's step where the host makes it; 0 if the device does.

        Gradients go to the host and parameters come back, and the host reads and writes what the operators do.
        """
        rehearsals = [each for each in (self._kind.fewer, self._kind.more) if each is not None]
        if self._pricing.on_host or not any(each.offloaded_bytes for each in rehearsals):
            return 0.0
        counts = []
        for rehearsal in rehearsals:
            operators = [record for record in rehearsal.update.records if isinstance(record, OperatorRecord)]
            starts, moved = sum(each.launches for each in operators), sum(each.num_bytes for each in operators)
            counts.append([float(rehearsal.offloaded_bytes), float(moved), float(starts)])
        held, read, launches = at_blocks(span_of(self._records, self._stage, None), counts)
        device, constants = self._pricing.cluster.device, self._pricing.cluster.constants
        link = device.host_bytes_per_s * constants.host_link_efficiency
        return (
            2 * held * MOVED_SHARE / link
            + read / constants.host_update_bytes_per_s
            + (launches * constants.update_launch_s)
        )

    def usual_s(self, slot: int, kind: str) -> float:
        """Returns the seconds of most actions of a kind on one chunk; 0 if there is none."""
        return self._usual.get((slot, kind), 0.0)

    def _time(self, place: ActionClass | None) -> ActionTime:
        is_last = place is None or not place.before
        times = [self._pricing.action_time(each, is_last=is_last) for each in shapes_of(self._kind, place)]
        span = span_of(self._records, self._stage, place)
        few, more = times[0].parts, times[-1].parts
        # what is not hidden of messages is not affine: where more blocks hide more, as much as is left is taken
        parts = tuple(
            part if number < len(PARTS) or b >= a else b
            for number, (part, a, b) in enumerate(
                zip(at_blocks(span, [each.parts for each in times]), few, more, strict=True)
            )
        )
        (launches,) = at_blocks(span, [[each.launches] for each in times])
        return ActionTime(parts, launches, times[0].axes)

    def _flops(self, place: ActionClass) -> float:
        counts = [[sum(r.flops for r in each.records if isinstance(r, OperatorRecord))]
                  for each in shapes_of(self._kind, place)]  # fmt: skip
        return float(at_blocks(span_of(self._records, self._stage, place), counts)[0])
