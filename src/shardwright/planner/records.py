"""The records of a layout: what each action of each stage does, from rehearsals of few blocks, extended to all.

Blocks repeat, stages between the first and the last are alike, and so are the microbatches between the first and the
last. So a layout of 96 blocks on 64 stages is rehearsed on 3 stages with 5 microbatches, with one block a chunk and
with two (or four and five): whatever an action does is affine in its blocks. A model without alike blocks is rehearsed
whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.analysis.model_graph import ModelGraph
from shardwright.axes import layout_axes, mesh_axes
from shardwright.errors import LayoutError
from shardwright.layout import Factor, Layout
from shardwright.ledger.account import JobPlan
from shardwright.parallelize.planning import job_for, make_plan, num_rows
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Action, Schedule, accumulate
from shardwright.planner.blocks import AlikeBlocks, alike_blocks, counts_of
from shardwright.planner.rehearse import ActionRecord, RankRecord, Record, rehearse

FEW_STAGES, FEW_MICROBATCHES = 3, 3
"""As many stages and microbatches hold one of each kind: the first, one between, the last. On stages it takes one
microbatch more than stages until each runs forwards and backwards by turns."""

FEWER_AND_MORE, WHERE_UNSHARDED = (1, 2), (4, 5)
"""The blocks in a chunk of the two rehearsals; the second pair where parameters are unsharded ahead of their use."""

Held = tuple[int, ...]
"""Bytes by kind of memory, in the order of :data:`shardwright.ledger.tracking.KINDS`."""


class Place(NamedTuple):
    """Which action: the chunk's number on its stage, the kind, first, last or between, and what comes before and next.

    What an action allocates and frees depends on its neighbours: a stage begins to receive for the next one.
    """

    slot: int
    kind: str
    order: str
    after: str = ""
    before: str = ""


class ActionShape(NamedTuple):
    """What one action does: its records, and the bytes held at each moment beyond those held before it."""

    records: tuple[Record, ...]
    moments: tuple[Held, ...]

    @property
    def net(self) -> Held:
        """The bytes by kind that the action leaves behind."""
        return self.moments[-1] if self.moments else ()


class StageRecord(NamedTuple):
    """One rehearsal of a stage: the blocks in each of its chunks, the bytes held before the step, and its actions."""

    num_blocks: tuple[int, ...]
    num_microbatches: int
    base: Held
    actions: Mapping[Place, ActionShape]
    update: ActionShape
    beside: Mapping[str, int]


class StageRecords(NamedTuple):
    """The rehearsals of a stage's kind with fewer and with more blocks; one alone if it was rehearsed as it is."""

    fewer: StageRecord
    more: StageRecord | None


@dataclass(frozen=True)
class LayoutRecords:
    """All that pricing needs of a layout: its plan, its schedule, each stage's records and blocks in each chunk."""

    plan: Plan
    schedule: Schedule
    stages: tuple[StageRecords, ...]
    num_blocks: tuple[tuple[int, ...], ...]
    num_rehearsals: int
    samples: int
    """The samples of a microbatch, the largest where they are not alike."""
    note: str = ""
    """Why the layout was rehearsed whole, if it was."""


def record_layout(
    job: Job, layout: Layout, batch: tuple[Any, Any], device_type: str, *, optimizer: Any = torch.optim.AdamW,
    whole: bool = False, most_whole: int | None = None,
) -> LayoutRecords:  # fmt: skip
    """Returns the records of a layout on a global batch (on the meta device), from as few rehearsals as it takes.

    With ``whole``, every stage is rehearsed as it is. Raises: LayoutError, PlanError: the model cannot have the layout,
    or more than ``most_whole`` stages would have to be rehearsed as they are.
    """
    plan, _ = make_plan(job, layout)
    schedule = plan.schedule or accumulate(layout.num_microbatches)
    shape = _Shape(job, plan.layout, plan, schedule, batch, device_type, optimizer)
    why = "asked for"
    if not whole:
        try:
            return _from_few(shape)
        except _NotAlikeError as different:
            why = str(different)
    if most_whole is not None and schedule.num_stages > most_whole:
        raise LayoutError(
            "stages that are not alike would each have to be rehearsed",
            given=f"{schedule.num_stages} stages; {why}",
            allowed=f"{most_whole} in a search",
            fix="price this layout alone, with --layout",
        )
    return _from_all(shape, why)


class _NotAlikeError(Exception):
    """Raised where few blocks do not show what all do; its text says why."""


class _Shape(NamedTuple):
    job: Job
    layout: Layout
    plan: Plan
    schedule: Schedule
    batch: tuple[Any, Any]
    device_type: str
    optimizer: Any

    @property
    def copies(self) -> int:
        return prod(self.layout.mesh[axis] for axis in mesh_axes("copies"))

    @property
    def samples(self) -> int:
        local = -(-num_rows(self.batch) // self.copies)
        return -(-local // self.layout.num_microbatches)

    def rehearsed(self, job: Job, layout: Layout, num_stages: int) -> list[RankRecord]:
        """Rehearses the first rank of each stage, from one plan."""
        few = first_rows(self.batch, self.copies * layout.num_microbatches * self.samples)
        fitted = job_for(job.model, job.loss, layout, few[0], job.num_tokens, job.roles)
        fitted = fitted._replace(stages=job.stages or fitted.stages, seconds={})
        planned = JobPlan(*make_plan(fitted, layout))
        ranks = (layout.mesh.first_rank(mesh_axes("stages"), stage) for stage in range(num_stages))
        return [rehearse(fitted, planned, rank, few, self.device_type, self.optimizer) for rank in ranks]


def first_rows(batch: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    """Returns a batch on the meta device with the shapes of another, but for its number of samples."""
    found: tuple[Any, Any] = tree_map_only(
        Tensor, lambda t: torch.empty((number, *t.shape[1:]), dtype=t.dtype, device="meta"), batch
    )
    return found


def _with_few(layout: Layout, num_stages: int, num_microbatches: int) -> Layout:
    kinds = layout_axes()
    factors = tuple(
        Factor(f.axis, (num_stages,), f.options) if kinds[f.axis].kind == "stages" else f for f in layout.factors
    )
    return replace(layout, factors=factors, num_microbatches=num_microbatches)


def _from_all(shape: _Shape, why: str) -> LayoutRecords:
    """Rehearses every stage as it is, with few microbatches where the schedule allows."""
    layout, schedule = shape.layout, shape.schedule
    for tried, few in _fewer_microbatches(shape, schedule.num_stages, shape.job):
        if _has_all_actions(few, schedule):
            layout, schedule = tried, few
            break
    stages = []
    for stage, record in enumerate(shape.rehearsed(shape.job, layout, schedule.num_stages)):
        stages.append(StageRecords(_stage_record(record, schedule, stage, ()), None))
    blocks = tuple(() for _ in stages)
    return LayoutRecords(
        shape.plan, shape.schedule, tuple(stages), blocks, schedule.num_stages, shape.samples, f"rehearsed whole: {why}"
    )


def _fewer_microbatches(shape: _Shape, num_stages: int, job: Job) -> Iterator[tuple[Layout, Schedule]]:
    """Yields layouts of so many stages with few microbatches, which the schedule takes, and their schedules."""
    all_of_them = shape.layout.num_microbatches
    few = num_stages + 2 if num_stages > 1 else FEW_MICROBATCHES
    for number in dict.fromkeys(min(each, all_of_them) for each in (few, 2 * num_stages, all_of_them)):
        tried = _with_few(shape.layout, num_stages, number)
        try:
            plan, _ = make_plan(job._replace(seconds={}), tried)
        except LayoutError:
            continue
        yield tried, plan.schedule or accumulate(number)


def _from_few(shape: _Shape) -> LayoutRecords:
    blocks = alike_blocks(shape.job.model)
    if blocks is None:
        raise _NotAlikeError("no two blocks of the model are alike")
    if shape.job.roles or shape.job.stages:
        raise _NotAlikeError("roles or stages are given by name")
    _check_alike_in_plan(blocks, shape.plan)
    chunks = _chunks(shape, blocks)
    few_stages = min(FEW_STAGES, shape.schedule.num_stages)
    sample_of = _sample_chunks(shape.schedule, few_stages)
    _check_kinds(shape.schedule, chunks, few_stages)
    numbers_of_blocks = WHERE_UNSHARDED if shape.plan.unsharded_on_use else FEWER_AND_MORE
    least = numbers_of_blocks[-1] * len(sample_of)
    if sum(count for count, _ in chunks) <= least:
        raise _NotAlikeError(f"the model has {blocks.number} alike blocks, as few as would be rehearsed")
    found: list[tuple[list[StageRecord], Schedule]] = []
    layout: Layout | None = None
    for number in numbers_of_blocks:
        sizes = [number * (chunks[chunk][0] > 0) for chunk in sample_of]
        job = _short_job(shape.job, blocks, chunks, sample_of, sizes)
        if layout is None:
            few = next(_fewer_microbatches(shape, few_stages, job), None)
            if few is None or few[1].stage_of != _stage_of(shape.schedule, few_stages):
                raise _NotAlikeError("the schedule on few stages is another one")
            layout, schedule = few
            _check_schedule(shape.schedule, schedule)
        records = []
        for stage, record in enumerate(shape.rehearsed(job, layout, few_stages)):
            held = tuple(sizes[chunk] for chunk in schedule.chunks_of(stage))
            records.append(_stage_record(record, schedule, stage, held))
        found.append((records, schedule))
    fewer, more = found[0][0], found[1][0]
    kinds = [_kind(stage, shape.schedule.num_stages, few_stages) for stage in range(shape.schedule.num_stages)]
    numbers = tuple(tuple(chunks[chunk][0] for chunk in shape.schedule.chunks_of(stage)) for stage in range(len(kinds)))
    stages = tuple(StageRecords(fewer[kind], more[kind]) for kind in kinds)
    for kind in sorted(set(kinds)):
        _check_places(StageRecords(fewer[kind], more[kind]))
    return LayoutRecords(shape.plan, shape.schedule, stages, numbers, 2 * few_stages, shape.samples)


def _check_schedule(schedule: Schedule, few: Schedule) -> None:
    """Raises _NotAlikeError where a schedule on few stages lacks actions of that on all."""
    if not _has_all_actions(few, schedule):
        raise _NotAlikeError("the schedule on few stages has other actions")


def _has_all_actions(few: Schedule, schedule: Schedule) -> bool:
    known = [set(places(few, stage).values()) for stage in range(few.num_stages)]
    kinds = (_kind(stage, schedule.num_stages, few.num_stages) for stage in range(schedule.num_stages))
    return all(
        like(place, known[kind]) for stage, kind in enumerate(kinds) for place in set(places(schedule, stage).values())
    )


def _check_places(rehearsals: StageRecords) -> None:
    """Raises _NotAlikeError where an action does not grow with the blocks."""
    fewer, more = rehearsals.fewer, rehearsals.more
    assert more is not None, "rehearsed with fewer and with more blocks"
    for place, shape in fewer.actions.items():
        if place not in more.actions or len(more.actions[place].moments) < len(shape.moments):
            raise _NotAlikeError("what an action allocates does not grow with the blocks")


def _check_alike_in_plan(blocks: AlikeBlocks, plan: Plan) -> None:
    """Raises _NotAlikeError where the plan treats one of the blocks in another way than the others."""
    for treated in (plan.recomputed, plan.offloaded_activations, tuple(plan.frozen)):
        inside = {
            tuple(sorted(path.removeprefix(name) for path in treated if f"{path}.".startswith(f"{name}.")))
            for name in blocks.names
        }
        if len(inside) > 1:
            raise _NotAlikeError("the layout treats some of the alike blocks in another way")
    block_of = {name: block for block in blocks.names for name in plan.compute if name.startswith(f"{block}.")}
    for group in plan.param_groups:
        sliced = any(plan.state[name].gradient != plan.compute[name] for name in group.parameters)
        if sliced and len({block_of[name] for name in group.parameters if name in block_of}) > 1:
            raise _NotAlikeError("several blocks are one param group, of which the state is sharded")


def _chunks(shape: _Shape, blocks: AlikeBlocks) -> list[tuple[int, tuple[str, ...]]]:
    """Returns, for each chunk, its number of alike blocks and its other calls of modules."""
    stages = shape.plan.stages
    if stages is None:
        return [(blocks.number, ())]
    found = []
    for chunk in range(shape.schedule.num_chunks):
        count = counts_of(blocks, stages.chunked.calls_of(chunk))
        if count is None:
            raise _NotAlikeError("a stage begins inside of a block")
        found.append(count)
    return found


def _kind(stage: int, num_stages: int, few: int) -> int:
    """Returns which of a few stages stands for a stage of many: the first, one between, or the last."""
    return stage if stage < few - 1 else few - 1 if stage == num_stages - 1 else few - 2


def _representative(kind: int, num_stages: int, few: int) -> int:
    return num_stages - 1 if kind == few - 1 else kind


def _stage_of(schedule: Schedule, few: int) -> tuple[int, ...]:
    """Returns each chunk's stage if ``schedule`` had only ``few`` stages, in the same directions."""
    found: list[int] = []
    for turn in range(schedule.num_chunks // schedule.num_stages):
        onward = schedule.stage_of[turn * schedule.num_stages] == 0
        found += range(few) if onward else reversed(range(few))
    return tuple(found)


def _sample_chunks(schedule: Schedule, few: int) -> tuple[int, ...]:
    """Returns, for each chunk on few stages, the chunk on all of them that it stands for."""
    slots = dict[int, int]()
    found = []
    for kind in _stage_of(schedule, few):
        stage, slot = _representative(kind, schedule.num_stages, few), slots.get(kind, 0)
        slots[kind] = slot + 1
        found.append(schedule.chunks_of(stage)[slot])
    return tuple(found)


def _check_kinds(schedule: Schedule, chunks: Sequence[tuple[int, tuple[str, ...]]], few: int) -> None:
    """Raises _NotAlikeError unless chunks of one kind of stage differ by their number of blocks alone."""
    kinds: dict[tuple[int, int], tuple[bool, tuple[str, ...]]] = {}
    for stage in range(schedule.num_stages):
        for slot, chunk in enumerate(schedule.chunks_of(stage)):
            count, others = chunks[chunk]
            key = (_kind(stage, schedule.num_stages, few), slot)
            if kinds.setdefault(key, (count > 0, others)) != (count > 0, others):
                raise _NotAlikeError("stages between the first and the last call other modules")


def _short_job(
    job: Job, blocks: AlikeBlocks, chunks: Sequence[tuple[int, tuple[str, ...]]], sample_of: Sequence[int],
    sizes: Sequence[int],
) -> Job:  # fmt: skip
    """Returns the job with as many blocks as ``sizes`` say, and the modules at which its chunks begin."""
    model = blocks.shortened(job.model, sum(sizes))
    job = job._replace(graph=ModelGraph(model, job.example) if job.graph is not None else None)
    if len(sizes) == 1:
        return job._replace(model=model)
    done, names = 0, list[str]()
    for size, chunk in zip(sizes, sample_of, strict=True):
        others = chunks[chunk][1]
        names.append(others[0] if (not names or not size) and others else blocks.names[done])
        done += size
    return job._replace(model=model, stages=tuple(names))


def places(schedule: Schedule, stage: int) -> dict[Action, Place]:
    """Returns the :class:`Place` of each action of a stage: its chunk, kind, order among those, and neighbors."""
    slots = {chunk: slot for slot, chunk in enumerate(schedule.chunks_of(stage))}
    seen: dict[tuple[int, str], list[Action]] = {}
    for action in schedule.actions[stage]:
        seen.setdefault((slots[action.chunk], action.kind), []).append(action)
    kinds = ["", *(f"{slots[action.chunk]}{action.kind}" for action in schedule.actions[stage]), ""]
    around = dict(zip(schedule.actions[stage], zip(kinds, kinds[2:], strict=False), strict=True))
    found = {}
    for (slot, kind), actions in seen.items():
        for number, action in enumerate(actions):
            order = "first" if number == 0 else "last" if action is actions[-1] else "between"
            order = "only" if len(actions) == 1 else order
            found[action] = Place(slot, kind, order, *around[action])
    return found


def like(place: Place, actions: Iterable[Place]) -> Place | None:
    """Returns the rehearsed place most like another: of its order, between the same actions; None if there is none."""
    orders = {"between": ("between", "last"), "last": ("last", "between")}.get(place.order, (place.order,))
    known = [each for each in actions if each[:2] == place[:2] and each.order in orders]
    if not known:
        return None
    own = place.kind != "F"  # a backward's last one sums gradients; the last forward is like others

    def likeness(each: Place) -> tuple[bool, ...]:
        same = each.after == place.after, each.before == place.before
        return (each.order == place.order, all(same), *same) if own else (all(same), *same, each.order == place.order)

    return max(known, key=likeness)


def _stage_record(record: RankRecord, schedule: Schedule, stage: int, num_blocks: tuple[int, ...]) -> StageRecord:
    base = held = record.by_action["begin"].moments[-1]
    actions: dict[Place, ActionShape] = {}
    where, blocks, number = places(schedule, stage), num_blocks, schedule.num_microbatches
    for action in schedule.actions[stage]:
        done = record.by_action.get(str(action), ActionRecord())
        shape = _action_shape(done, held)
        held = done.moments[-1] if done.moments else held
        actions.setdefault(where[action], shape)
    update = _action_shape(record.by_action["optimizer"], held)
    return StageRecord(blocks, number, base, actions, update, record.beside)


def _action_shape(done: ActionRecord, before: Held) -> ActionShape:
    moments = tuple(tuple(a - b for a, b in zip(each, before, strict=True)) for each in done.moments)
    return ActionShape(tuple(done.records), moments or (tuple(0 for _ in before),))
