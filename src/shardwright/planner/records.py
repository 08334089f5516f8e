"""The records of a layout: each action's operators, messages and memory, from steps on the meta device with few blocks.

Blocks repeat, stages between the first and the last are alike, and so are the microbatches between the first and the
last. So a layout of 96 blocks on 64 stages is rehearsed on 3 stages with 5 microbatches, once with one block in each
chunk and once with two (or with four and with five, if parameters are unsharded on use): what an action does grows
linearly with its blocks. A model whose blocks are not alike is rehearsed with all its blocks and stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.analysis.objects.marked_inputs import map_samples
from shardwright.analysis.on_meta.operator_results import map_tensors
from shardwright.axes import layout_axes, mesh_axes
from shardwright.errors import LayoutError
from shardwright.layout import Factor, Layout
from shardwright.ledger.account import JobPlan
from shardwright.mesh import Mesh
from shardwright.parallelize.planning import job_for, make_plan, num_rows
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Schedule, accumulate
from shardwright.planner.blocks import AlikeBlocks
from shardwright.planner.layout_records import ActionShape, HeldBytes, LayoutRecords, StageRecord, StageRecords
from shardwright.planner.outline import (
    Chunks,
    ModelPlans,
    NotAlikeError,
    RehearsalState,
    StageBlocks,
    check_param_groups,
    crossing_of,
    cuts_of,
)
from shardwright.planner.places import (
    ActionClass,
    action_orders,
    has_all_actions,
    kind_of,
    representative,
    sample_chunks,
    stage_of,
)
from shardwright.planner.rehearse import P2P, ActionRecord, MessageRecord, RankRecord, StepRecord, WaitRecord, rehearse

FEW_STAGES, FEW_MICROBATCHES = 3, 3
"""The numbers of stages, and of microbatches on a single stage, that are rehearsed: the first, one between, the last.
Several stages are rehearsed with at least two microbatches more than stages, if the layout has as many, so that each
alternates forwards and backwards. Where a backward ends with messages under way, such as sums of gradients in each
microbatch, there is one microbatch more, since only the third backward is like those that follow."""

MOST_SAMPLES = 8
"""The most samples on which a forward is run to see whether it uses all repeated blocks in the same way."""

FEWER_AND_MORE, WHERE_RECOMPUTED, WHERE_UNSHARDED = (1, 2), (2, 3), (4, 5)
"""The numbers of blocks in each chunk in the two rehearsals. The second pair is for recomputed blocks that
differ in what they hold where they are the first or the last, the third for layouts that unshard parameters at each use
(``dp2/zero3``)."""


UNLIKE_STAGES = "stages that are not alike would each have to be rehearsed"
"""The error's text for a layout that a search does not rehearse, since it has too many stages that are not alike."""


def record_layout(
    job: Job, layout: Layout, batch: tuple[Any, Any], device_type: str, *, optimizer: Any = torch.optim.AdamW,
    whole: bool = False, most_whole: int | None = None, model_plans: ModelPlans | None = None,
) -> LayoutRecords:  # fmt: skip
    """Returns the operators, messages and memory of each stage's actions under a layout.

    They come from as few steps on the meta device (rehearsals) as possible. ``batch`` is a global batch (inputs,
    targets), of which only shapes and dtypes matter. ``device_type`` is the type of the devices to predict memory for,
    such as "cuda", and ``optimizer`` a class. With ``whole``, every stage is rehearsed with all its blocks.
    ``model_plans`` caches what layouts of one model share.

    Raises: LayoutError, PlanError: the model cannot have the layout or does not run on the meta device, or more than
        ``most_whole`` stages would have to be rehearsed with all their blocks.
    """
    model_plans = ModelPlans(job.model, few_inputs(batch)) if model_plans is None else model_plans
    outline, is_known = model_plans.outline(job, layout)
    counts, known = Counter[str](), model_plans.known
    shape = _Shape(job, outline.layout, outline.schedule, batch, device_type, optimizer, counts, known)
    why = "asked for"
    if not whole:
        try:
            return _from_few(shape, outline, model_plans)
        except NotAlikeError as different:
            why = str(different)
    if is_known:
        make_plan(job, layout)  # raises if the layout is refused; the cached outline may be that of another layout
    if most_whole is not None and shape.schedule.num_stages > most_whole:
        raise LayoutError(
            UNLIKE_STAGES,
            given=f"{shape.schedule.num_stages} stages; {why}",
            allowed=f"{most_whole} in a search",
            fix="price this layout alone, with --layout",
        )
    return _from_all(shape, why)


class _Shape(NamedTuple):
    job: Job
    layout: Layout
    schedule: Schedule
    batch: tuple[Any, Any]
    device_type: str
    optimizer: Any
    counts: Counter[str]
    """How many rehearsals were made, as "rehearsals"."""
    known: RehearsalState

    @property
    def copies(self) -> int:
        return prod(self.layout.mesh[axis] for axis in mesh_axes("copies"))

    @property
    def samples(self) -> int:
        """The number of samples of the largest microbatch."""
        local = -(-num_rows(self.batch) // self.copies)
        return -(-local // self.layout.num_microbatches)

    def planned(self, job: Job, layout: Layout) -> _JobLayout:
        """Returns the plan and the batch for a rehearsal of ``job``, which may have few blocks, under ``layout``."""
        few = first_rows(self.batch, self.copies * layout.num_microbatches * self.samples)
        fitted = job_for(job.model, job.loss, layout, few[0], job.num_tokens, job.roles, self.known.runs)
        fitted = fitted._replace(stages=job.stages or fitted.stages, seconds={})
        return _JobLayout(fitted, layout, JobPlan(*make_plan(fitted, layout)), few)

    def rehearsed(self, planned: _JobLayout) -> list[RankRecord]:
        """Returns the rehearsal of the first rank of each stage; that of stage 0 may have been made (``first``).

        Messages have the ranks of the whole layout, for which those of few stages stand.
        """
        layout = planned.layout
        ranks = [layout.mesh.first_rank(mesh_axes("stages"), stage) for stage in range(planned.schedule.num_stages)]
        records = [self.rehearsed_at(planned, ranks[0]) if planned.first is None else planned.first]
        records += [self.rehearsed_at(planned, rank) for rank in ranks[1:]]
        few, own = layout.mesh, self.layout.mesh
        if few != own:
            among = cache(partial(_among_all, few=few, own=own))
            for action in (action_record for record in records for action_record in record.by_action.values()):
                action.records = [
                    record._replace(ranks=among(record.ranks)) if isinstance(record, MessageRecord) else record
                    for record in action.records
                ]
        return records

    def rehearsed_at(self, planned: _JobLayout, rank: int) -> RankRecord:
        """Returns the rehearsal of one rank, and adds one to the number of rehearsals."""
        self.counts["rehearsals"] += 1
        return rehearse(planned.job, planned.plan, rank, planned.batch, self.device_type, self.optimizer)


def _among_all(ranks: tuple[int, ...], few: Mesh, own: Mesh) -> tuple[int, ...]:
    """Returns the ranks of the mesh ``own`` for which ``ranks`` of the mesh ``few``, which has few stages, stand."""
    own_ranks = []
    for rank in ranks:
        coord = few.coord(rank)
        for axis in (mesh_axis for mesh_axis in mesh_axes("stages") if mesh_axis in coord):
            coord[axis] = representative(coord[axis], own[axis], few[axis])
        own_ranks.append(own.rank(coord))
    return tuple(own_ranks)


class _JobLayout(NamedTuple):
    job: Job
    layout: Layout
    plan: JobPlan
    batch: tuple[Any, Any]
    first: RankRecord | None = None
    """The rehearsal of rank 0's step; None if it was not made yet."""

    @property
    def schedule(self) -> Schedule:
        return self.plan.plan.schedule or accumulate(self.layout.num_microbatches)


def first_rows(batch: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    """Returns a batch of ``number`` samples like those of ``batch``, which are repeated where it has fewer."""
    few, wanted = map_samples(batch, partial(_first_of, number))
    return few, map_tensors(wanted, lambda t: t.to("meta"))


def few_inputs(batch: tuple[Any, Any]) -> Any:
    """Returns the inputs of the first samples of a batch, eight at most, to see on how a forward uses its blocks."""
    return first_rows(batch, min(num_rows(batch), MOST_SAMPLES))[0]


def _first_of(number: int, tensor: Tensor) -> Tensor:
    if len(tensor) >= number and not tensor.is_meta:  # no copy: the rows are moved to the meta device next
        return tensor[:number]
    return tensor[torch.arange(number) % len(tensor)]  # a new tensor: a view would count as the memory of the whole


def _with_few(layout: Layout, num_stages: int, num_microbatches: int) -> Layout:
    kinds = layout_axes()
    factors = tuple(
        Factor(f.axis, (num_stages,), f.options) if kinds[f.axis].kind == "stages" else f for f in layout.factors
    )
    return replace(layout, factors=factors, num_microbatches=num_microbatches)


def _from_all(shape: _Shape, why: str) -> LayoutRecords:
    """Returns records of every stage with all its blocks, from few microbatches where the schedule allows it."""
    candidates = _fewer_microbatches(shape, shape.schedule.num_stages, shape.job)
    planned = next((candidate for candidate in candidates if has_all_actions(candidate.schedule, shape.schedule)), None)
    planned = planned or shape.planned(shape.job, shape.layout)
    records = _stage_records(shape.rehearsed(planned), planned.schedule, ())
    stages = tuple(StageRecords(record, None) for record in records)
    note, narrow = f"rehearsed whole, which takes longer: {why}", _sums_narrow(planned.plan.plan, stages)
    unlike = tuple(() for _ in stages)
    return LayoutRecords(shape.layout, shape.schedule, stages, unlike, shape.counts["rehearsals"], narrow, note)


def _fewer_microbatches(shape: _Shape, num_stages: int, job: Job) -> Iterator[_JobLayout]:
    """Yields plans for ``num_stages`` stages with few microbatches; numbers that the schedule refuses are skipped."""
    all_of_them = shape.layout.num_microbatches
    few = num_stages + 2 if num_stages > 1 else FEW_MICROBATCHES
    for number in dict.fromkeys(min(count, all_of_them) for count in (few, 2 * num_stages, all_of_them)):
        with suppress(LayoutError):
            planned = shape.planned(job, _with_few(shape.layout, num_stages, number))
            plan = planned.plan.plan
            sliced = any(plan.state[name].gradient != plan.compute[name] for name in plan.state)
            if number < all_of_them and sliced:
                if planned.schedule.actions not in shape.known.leaving_messages:
                    planned = planned._replace(first=shape.rehearsed_at(planned, 0))
                    if _leaves_messages(planned):
                        shape.known.leaving_messages.add(planned.schedule.actions)
                if planned.schedule.actions in shape.known.leaving_messages:
                    with suppress(LayoutError):
                        yield shape.planned(job, _with_few(shape.layout, num_stages, number + 1))
            yield planned


def _leaves_messages(planned: _JobLayout) -> bool:
    """Returns whether a backward of rank 0, other than its last, ends with sums of gradients under way."""
    rank = planned.first
    assert rank is not None, "rehearsed before"
    backwards = [action for action in planned.schedule.actions[0] if action.kind != "F"]
    records = [rank.by_action.get(str(action), ActionRecord()).records for action in backwards[:-1]]
    return any(_under_way(action_records) for action_records in records)


def _under_way(records: Sequence[StepRecord]) -> bool:
    awaited = {record.began for record in records if isinstance(record, WaitRecord)}
    began = {i for i, record in enumerate(records) if isinstance(record, MessageRecord) and record.kind not in P2P}
    return bool(began - awaited)


def _from_few(shape: _Shape, outline: StageBlocks, model_plans: ModelPlans) -> LayoutRecords:
    chunks, schedule = outline.chunks_alike(), shape.schedule
    few_stages = min(FEW_STAGES, schedule.num_stages)
    _check_kinds(schedule, chunks, few_stages)
    is_like_others = shape.layout.recompute is None or not shape.known.recomputed_blocks_differ
    plans = _planned_few(shape, chunks, model_plans, FEWER_AND_MORE if is_like_others else WHERE_RECOMPUTED)
    plan = plans[0][0].plan.plan
    if plan.unsharded_on_use:
        plans = _planned_few(shape, chunks, model_plans, WHERE_UNSHARDED)
    elif not _are_cut(plans, outline, model_plans):  # a cut that pays for all blocks may not pay for one
        plans = _planned_few(shape, chunks, model_plans, WHERE_RECOMPUTED)
    if not _are_cut(plans, outline, model_plans):
        raise NotAlikeError("few blocks are cut in another way than all")
    if any(crossing_of(planned.plan.plan) != outline.crossing for planned, _ in plans):
        raise NotAlikeError("stages of few blocks send another number of values than those of all")
    fewer, more = _both_records(shape, plans)
    # blocks that begin the model are not compared: their first one differs in any case, recomputed or not
    begin = _begin_the_model(shape.job.model, model_plans.blocks)
    recomputes = plan.recomputed and not plan.unsharded_on_use and not begin
    if recomputes and is_like_others and _differ(fewer, more):
        shape.known.recomputed_blocks_differ = True
        fewer, more = _both_records(shape, _planned_few(shape, chunks, model_plans, WHERE_RECOMPUTED))
    kinds = [kind_of(stage, schedule.num_stages, few_stages) for stage in range(schedule.num_stages)]
    numbers = tuple(tuple(chunks[chunk][0] for chunk in schedule.chunks_of(stage)) for stage in range(len(kinds)))
    stages = tuple(StageRecords(fewer[kind], more[kind]) for kind in kinds)
    for kind in sorted(set(kinds)):
        _check_places(StageRecords(fewer[kind], more[kind]))
    return LayoutRecords(
        shape.layout, schedule, stages, numbers, shape.counts["rehearsals"], _sums_narrow(plan, stages)
    )


def _sums_narrow(plan: Plan, stages: Iterable[StageRecords]) -> bool:
    """Returns whether a layout sums gradients of several microbatches in bf16 or fp16.

    Gradients that are sent to their shards after each microbatch are summed there, in the dtype of the shard, and with
    ``fp32-sums`` all are summed in fp32.
    """
    trained = (name for name in plan.state if name not in plan.frozen and name not in plan.fp32_sums)
    if plan.layout.num_microbatches == 1 or all(plan.compute_dtypes[name].itemsize >= 4 for name in trained):
        return False
    copies = mesh_axes("copies")
    first = (shape for stage in stages for place, shape in stage.fewer.actions.items()
             if place.kind != "F" and place.order == "first")  # fmt: skip
    return not any(
        isinstance(record, MessageRecord) and record.kind == "reduce_scatter" and record.axis in copies
        for shape in first
        for record in shape.records
    )


def _are_cut(found: Sequence[tuple[_JobLayout, Sequence[int]]], outline: StageBlocks, model_plans: ModelPlans) -> bool:
    """Returns whether plans of few blocks cut them as the plan of all does."""
    assert model_plans.blocks is not None, "there are chunks of alike blocks"
    few = ((model_plans.blocks._replace(number=sum(sizes)), planned.plan.plan) for planned, sizes in found)
    return all(cuts_of(blocks, plan) == outline.cuts for blocks, plan in few)


def _begin_the_model(model: nn.Module, blocks: AlikeBlocks | None) -> bool:
    """Returns whether the model's first parameter is in the first repeated block, which then takes the inputs."""
    first = next((name for name, _ in model.named_parameters()), "")
    return blocks is not None and first.startswith(f"{blocks.names[0]}.")


def _both_records(shape: _Shape, found: Sequence[tuple[_JobLayout, Sequence[int]]]) -> list[list[StageRecord]]:
    """Returns the records of all stages, first with fewer and then with more blocks."""
    return [[*_stage_records(shape.rehearsed(planned), planned.schedule, sizes)] for planned, sizes in found]


def _differ(fewer: Sequence[StageRecord], more: Sequence[StageRecord]) -> bool:
    """Returns whether a block allocates or frees other bytes where further blocks come before or after it."""
    pairs = ((few.actions[place], many.actions.get(place)) for few, many in zip(fewer, more, strict=True)
             for place in few.actions)  # fmt: skip
    return any(few.front(many)[1] > 0 for few, many in pairs if many is not None)


def _planned_few(
    shape: _Shape, chunks: Chunks, model_plans: ModelPlans, numbers_of_blocks: tuple[int, int]
) -> list[tuple[_JobLayout, Sequence[int]]]:
    """Returns plans with fewer and with more blocks in a chunk, on few stages, and the blocks of their chunks.

    Raises: NotAlikeError: few blocks, stages or microbatches do not show what all do.
    """
    blocks, schedule, plans = model_plans.blocks, shape.schedule, list[tuple[_JobLayout, Sequence[int]]]()
    assert blocks is not None, "there are chunks of alike blocks"
    few_stages = min(FEW_STAGES, schedule.num_stages)
    sample_of = sample_chunks(schedule, few_stages)
    if sum(count for count, _ in chunks) <= numbers_of_blocks[-1] * len(sample_of):
        raise NotAlikeError(f"the model has {blocks.number} alike blocks, as few as would be rehearsed")
    for number in numbers_of_blocks:
        sizes = [number * (chunks[chunk][0] > 0) for chunk in sample_of]
        job = _short_job(shape.job, model_plans, chunks, sample_of, sizes)
        if plans:
            planned = shape.planned(job, plans[0][0].layout)
        else:
            first = next(_fewer_microbatches(shape, few_stages, job), None)
            if first is None or first.schedule.stage_of != stage_of(schedule, few_stages):
                raise NotAlikeError("the schedule on few stages is another one")
            if not has_all_actions(first.schedule, schedule):
                raise NotAlikeError("the schedule on few stages has other actions")
            planned = first
        check_param_groups(blocks._replace(number=sum(sizes)), planned.plan.plan)
        plans.append((planned, sizes))
    return plans


def _check_places(rehearsals: StageRecords) -> None:
    """Raises NotAlikeError if an action is missing, or has fewer moments, in the rehearsal with more blocks."""
    fewer, more = rehearsals.fewer, rehearsals.more
    assert more is not None, "rehearsed with fewer and with more blocks"
    for place, shape in fewer.actions.items():
        if place not in more.actions or len(more.actions[place].moments) < len(shape.moments):
            raise NotAlikeError("what an action allocates does not grow with the blocks")


def _check_kinds(schedule: Schedule, chunks: Chunks, few: int) -> None:
    """Raises NotAlikeError if stages that one stage stands for differ in more than their numbers of blocks."""
    kinds: dict[tuple[int, int], tuple[bool, tuple[str, ...]]] = {}
    for stage in range(schedule.num_stages):
        for slot, chunk in enumerate(schedule.chunks_of(stage)):
            count, others = chunks[chunk]
            key = (kind_of(stage, schedule.num_stages, few), slot)
            if kinds.setdefault(key, (count > 0, others)) != (count > 0, others):
                raise NotAlikeError("stages between the first and the last call other modules")


def _short_job(
    job: Job, model_plans: ModelPlans, chunks: Chunks, sample_of: Sequence[int], sizes: Sequence[int]
) -> Job:
    """Returns the job with as many blocks as ``sizes`` say, and the modules at which its chunks begin."""
    model, blocks = model_plans.shortened(sum(sizes)), model_plans.blocks
    assert blocks is not None, "there are chunks of alike blocks"
    if len(sizes) == 1:
        return job._replace(model=model)
    done, names = 0, list[str]()
    for size, chunk in zip(sizes, sample_of, strict=True):
        others = chunks[chunk][1]
        names.append(others[0] if (not names or not size) and others else blocks.names[done])
        done += size
    return job._replace(model=model, stages=tuple(names))


def _stage_records(ranks: Iterable[RankRecord], schedule: Schedule, blocks: Sequence[int]) -> Iterator[StageRecord]:
    """Yields the record of each stage, from the rehearsal of its first rank; its chunks have so many ``blocks``."""
    for stage, record in enumerate(ranks):
        held = tuple(blocks[chunk] for chunk in schedule.chunks_of(stage)) if blocks else ()
        yield _stage_record(record, schedule, stage, held)


def _stage_record(record: RankRecord, schedule: Schedule, stage: int, num_blocks: tuple[int, ...]) -> StageRecord:
    base = held = record.by_action["begin"].moments[-1]
    actions: dict[ActionClass, ActionShape] = {}
    where = action_orders(schedule)[stage]
    for action, number in zip(schedule.actions[stage], where.order, strict=True):
        done = record.by_action.get(str(action), ActionRecord())
        shape = _action_shape(done, held)
        held = done.moments[-1] if done.moments else held
        actions.setdefault(where.classes[number], shape)
    update = _action_shape(record.by_action["optimizer"], held)
    offloaded = record.offloaded_bytes
    return StageRecord(num_blocks, schedule.num_microbatches, base, actions, update, record.beside, offloaded)


def _action_shape(done: ActionRecord, before: HeldBytes) -> ActionShape:
    moments = tuple(tuple(a - b for a, b in zip(moment, before, strict=True)) for moment in done.moments)
    return ActionShape(tuple(done.records), moments or (tuple(0 for _ in before),))
