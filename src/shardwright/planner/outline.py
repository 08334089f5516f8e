"""``ModelPlans``: a cache of what layouts of one model share: repeated blocks, pipeline schedules and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import nn

from shardwright.analysis.model_graph import RecordStore
from shardwright.axes import layout_axes, mesh_axes
from shardwright.layout import Factor, Layout
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Schedule, accumulate
from shardwright.planner.block_runs import unlike_in_run
from shardwright.planner.blocks import AlikeBlocks, alike_blocks, counts_of
from shardwright.planner.records_file import RecordsFile

Chunks = Sequence[tuple[int, tuple[str, ...]]]
"""For each pipeline chunk, its number of repeated blocks, and the names of the other modules that it calls."""


BlockCuts = tuple[tuple[str, tuple[int, ...]], ...]
"""The shape of a rank's shard of each parameter of a repeated block, by the parameter's name in the block."""


class NotAlikeError(Exception):
    """Raised if a rehearsal of a few of a model's repeated blocks cannot stand for all; the error's text says why."""


class StageBlocks(NamedTuple):
    """A layout's schedule, and for each pipeline chunk its number of repeated blocks and its calls of other modules.

    If a few blocks cannot stand for all, ``unlike`` says why and ``chunks`` is empty; else ``unlike`` is "". ``cuts``
    has the shapes of a block's parameters on a rank.
    """

    layout: Layout
    schedule: Schedule
    chunks: Chunks = ()
    unlike: str = ""
    cuts: BlockCuts = ()
    crossing: frozenset[int] = frozenset()
    """The numbers of tensors that stages send to the next one: {1} if each sends one, {1, 2} if some send two."""

    def chunks_alike(self) -> Chunks:
        """Returns, for each chunk, its number of repeated blocks and its calls of other modules.

        Raises: NotAlikeError: a few blocks cannot stand for all, for the reason in ``unlike``.
        """
        if self.unlike:
            raise NotAlikeError(self.unlike)
        return self.chunks


@dataclass
class RehearsalState:
    """What rehearsals of one model's layouts have shown, so that further rehearsals need not find it out again."""

    leaving_messages: set[object] = field(default_factory=set)
    """The schedules, as their actions, of which a backward ended with sums of gradients under way, in one layout or
    more. They are rehearsed with one microbatch more, which shows the same where nothing is under way."""
    recomputed_blocks_differ: bool = False
    """Whether a recomputed block was seen to hold other bytes where it was the first or the last one. If so, layouts
    with recomputation are rehearsed with two and three blocks, of which one has others before and after it."""
    runs: RecordStore = field(default_factory=RecordStore)
    """The recorded forwards of the model and of shortened ones."""


@dataclass
class ModelPlans:
    """A cache of a model's repeated blocks, of shortened copies of it, and of the blocks in each chunk by layout."""

    model: nn.Module
    inputs: Any = None
    """The inputs of a few samples, on which a forward shows whether all repeated blocks are used in the same way. If it
    is None, they are taken to be."""
    kept: RecordsFile = field(default_factory=RecordsFile)
    known: RehearsalState = field(default_factory=RehearsalState)
    _outlines: dict[Layout, StageBlocks] = field(default_factory=dict)
    _shortened: dict[int, nn.Module] = field(default_factory=dict)

    @cached_property
    def _same_code(self) -> AlikeBlocks | None:
        return alike_blocks(self.model)

    @cached_property
    def _why_not(self) -> str:
        if self._same_code is None:
            return "no two blocks of the model are alike"
        if self.inputs is None:
            return ""
        return self.kept.find("blocks in a run", partial(unlike_in_run, self.model, self._same_code, self.inputs))

    @property
    def blocks(self) -> AlikeBlocks | None:
        """The repeated blocks of the model, or None if no two are alike, or the forward uses some in another way."""
        return None if self._why_not else self._same_code

    @property
    def kind(self) -> str:
        """The name of the class of the model's repeated blocks, or of the model if no two blocks are alike."""
        blocks = self._same_code
        return type(self.model.get_submodule(blocks.names[0]) if blocks else self.model).__name__

    def shortened(self, number: int) -> nn.Module:
        """Returns a copy of the model on the meta device that has only the first ``number`` of its repeated blocks.

        The copy is cached, so callers must not change it. The model must have repeated blocks.
        """
        assert self.blocks is not None, "asked for a model with alike blocks"
        if number not in self._shortened:
            larger = min((count for count in self._shortened if count > number), default=None)
            whole, had = (self.model, self.blocks.number) if larger is None else (self._shortened[larger], larger)
            self._shortened[number] = self.blocks._replace(number=had).shortened(whole, number)
        return self._shortened[number]

    def outline(self, job: Job, layout: Layout) -> tuple[StageBlocks, bool]:
        """Returns a layout's schedule and blocks by chunk, and whether they were cached, perhaps for another layout.

        Layouts that differ only in the options of axes of model copies (``dp``) have the same ones. Such a layout is
        not planned again, so it may still be one that the model cannot have.

        Raises: LayoutError, PlanError: the model cannot have the layout.
        """
        kinds = layout_axes()
        plain = (Factor(f.axis, f.sizes) if kinds[f.axis].kind == "copies" else f for f in layout.factors)
        key = replace(layout, factors=tuple(plain))
        if key in self._outlines:
            return self._outlines[key]._replace(layout=layout), True
        plan, _ = make_plan(job, layout)
        schedule = plan.schedule or accumulate(layout.num_microbatches)
        try:
            chunks = self._chunks(job, plan, schedule)
            assert self.blocks is not None, "there are chunks of alike blocks"
            cuts = cuts_of(self.blocks, plan)
            outline = StageBlocks(plan.layout, schedule, chunks, cuts=cuts, crossing=crossing_of(plan))
        except NotAlikeError as different:
            outline = StageBlocks(plan.layout, schedule, unlike=str(different))
        if plan.layout == layout:  # else planning has chosen sizes or options, which fit only this very layout
            self._outlines[key] = outline
        return outline, False

    def _chunks(self, job: Job, plan: Plan, schedule: Schedule) -> Chunks:
        if self.blocks is None:
            raise NotAlikeError(self._why_not)
        if job.roles or job.stages:
            raise NotAlikeError("roles or stages are given by name")
        _check_alike_in_plan(self.blocks, plan)
        if plan.stages is None:
            return [(self.blocks.number, ())]
        if any(edge.target - edge.source > 1 for edge in plan.stages.chunked.edges):
            raise NotAlikeError("a stage takes what another than the one before it makes")
        chunks = []
        for chunk in range(schedule.num_chunks):
            count = counts_of(self.blocks, plan.stages.chunked.calls_of(chunk))
            if count is None:
                raise NotAlikeError("a stage begins inside of a block")
            chunks.append(count)
        return chunks


def _check_alike_in_plan(blocks: AlikeBlocks, plan: Plan) -> None:
    """Raises NotAlikeError where the plan treats one of the blocks in another way than the others."""
    for treated in (plan.recomputed, plan.offloaded_activations, tuple(plan.frozen)):
        inside = {
            tuple(sorted(path.removeprefix(name) for path in treated if f"{path}.".startswith(f"{name}.")))
            for name in blocks.names
        }
        if len(inside) > 1:
            raise NotAlikeError("the layout treats some of the alike blocks in another way")
    check_param_groups(blocks, plan)


def cuts_of(blocks: AlikeBlocks, plan: Plan) -> BlockCuts:
    """Returns the shapes of a block's parameters on the first rank of a stage.

    Raises: NotAlikeError: the first, the second and the last of the blocks are not cut in the same way.
    """
    coord, cuts = dict.fromkeys(plan.mesh.axes, 0), dict[BlockCuts, None]()
    for block in dict.fromkeys((*blocks.names[:2], blocks.names[-1])):
        layouts = {n.removeprefix(block): layout for n, layout in plan.compute.items() if n.startswith(f"{block}.")}
        for axis in (mesh_axis for mesh_axis in mesh_axes("stages") if mesh_axis in plan.mesh.axes):
            layouts = {name: layout.on_all(axis) for name, layout in layouts.items()}
        cuts[tuple((name, tuple(layout.local_shape(coord))) for name, layout in layouts.items())] = None
    if len(cuts) > 1:
        raise NotAlikeError("the layout cuts alike blocks in several ways")
    return next(iter(cuts))


def crossing_of(plan: Plan) -> frozenset[int]:
    """Returns how many tensors a stage sends to the next one, every number that occurs; empty without stages."""
    edges = () if plan.stages is None else plan.stages.chunked.edges
    return frozenset(len(edge.values) for edge in edges)


def check_param_groups(blocks: AlikeBlocks, plan: Plan) -> None:
    """Raises NotAlikeError if parameters of several blocks are in one param group whose gradients are sharded."""
    block_of = {name: block for block in blocks.names for name in plan.compute if name.startswith(f"{block}.")}
    for group in plan.param_groups:
        sliced = any(plan.state[name].gradient != plan.compute[name] for name in group.parameters)
        if sliced and len({block_of[name] for name in group.parameters if name in block_of}) > 1:
            raise NotAlikeError("several blocks are one param group, of which the state is sharded")
