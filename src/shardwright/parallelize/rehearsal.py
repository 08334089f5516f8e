"""Finds the shapes of the tensors that pipeline stages send each other, by running the model on the meta device.

Every part of the model runs with the rank's shard of each layer, and with a backend that sends nothing, so each tensor
has the shape that it has under tensor parallelism. Where the stages were cut from a recorded forward and there is no
tensor parallelism, the shapes are read from a recorded forward instead. ``StepTraffic`` computes the sizes of messages
from the shapes, and the memory ledger the memory that they take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from shardwright.analysis.calls.running_module import following_modules
from shardwright.analysis.chunks.arguments import bind
from shardwright.analysis.chunks.call_graph import prepare, run
from shardwright.analysis.chunks.events_chunked import EventsChunked, crossing_name
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import may_read_values
from shardwright.analysis.traced.structure import owners
from shardwright.axes import mesh_axes
from shardwright.comm.backends.fake import fake_world
from shardwright.mesh import Coord
from shardwright.operators.split_backward import DeferredGradients
from shardwright.plan.event_stages import EventStages
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Action, Schedule
from shardwright.plan.traffic import BoundaryTensor, Sent, different
from shardwright.rng import RngTracker
from shardwright.runtime.activation_checkpointing import checkpoint_activations
from shardwright.runtime.executor import Microbatch
from shardwright.sharding.tensor_shard import tagged
from shardwright.strategies.pipeline.cut_model import runs_on_shards
from shardwright.strategies.pipeline.ghost_stage import GhostStage
from shardwright.strategies.pipeline.p2p import P2P
from shardwright.strategies.pipeline.pipeline_stage import framed
from shardwright.strategies.pipeline.scatter import WholeShapes, may_scatter, whole_shapes
from shardwright.strategies.tensor_parallel.output_shards import starts_of
from shardwright.strategy import Strategy, apply_in_turn

Crossings = Mapping[str, tuple[BoundaryTensor, ...]]


class MicrobatchRehearsal(NamedTuple):
    """The tensors of one microbatch that pipeline chunks send each other, by name, as meta tensors.

    ``sent`` says how often each chunk calls each collective, if the stages were cut from a recorded forward and run on
    tensor-parallel shards. Otherwise it is empty, and the collectives are computed from the recorded calls of modules.
    ``scattered`` says, for each tensor of a value, whether each rank sends only a part of it. Values without such a
    tensor may be left out.
    """

    values: Mapping[str, Any]
    sent: Mapping[int, Sent] = MappingProxyType({})
    scattered: Mapping[str, tuple[bool, ...]] = MappingProxyType({})


def crossings(rehearsals: Sequence[MicrobatchRehearsal]) -> tuple[Crossings, ...]:
    """Returns, for each microbatch, the bytes of the tensors that pipeline chunks send each other, by name.

    A name may stand for several tensors. Each entry also says whether the tensor needs a gradient, and whether it is
    sent in parts.
    """

    def sizes(value: Any, scattered: tuple[bool, ...]) -> tuple[BoundaryTensor, ...]:
        tensors = _tensors(value)
        return tuple(
            BoundaryTensor(t.numel() * t.element_size(), t.requires_grad, t.element_size(), is_scattered)
            for t, is_scattered in zip(tensors, scattered or (False,) * len(tensors), strict=True)
        )

    by_id = {
        id(rehearsal): {
            name: sizes(value, rehearsal.scattered.get(name, ())) for name, value in rehearsal.values.items()
        }
        for rehearsal in different(rehearsals)
    }
    return tuple(by_id[id(rehearsal)] for rehearsal in rehearsals)


def values_crossing(
    job: Job,
    plan: Plan,
    strategies: Sequence[Strategy],
    microbatches: Sequence[Any],
    num_global: int,
    coord: Coord,
    num_tokens: int = 0,
) -> tuple[MicrobatchRehearsal, ...]:
    """Returns, for each microbatch, the meta tensors that pipeline chunks send each other, by name.

    ``microbatches`` are the inputs of the rank at ``coord``, on the meta device, from a global batch of ``num_global``
    samples of ``num_tokens`` tokens. ``job.model``, the whole model on the meta device, and ``job.loss`` are changed.
    """
    plan = replace(
        plan,
        compute={name: layout.on_all("pp") for name, layout in plan.compute.items()},
        buffers={name: layout.on_all("pp") for name, layout in plan.buffers.items()},
    )
    assert plan.stages is not None, "the pipeline has placed its stages"
    num_parts = 1 if plan.scatter_axis is None else plan.mesh[plan.scatter_axis]
    if isinstance(plan.stages, EventStages):
        if runs_on_shards(plan):
            return _values_on_shards(job, plan, strategies, microbatches, coord, num_parts)
        return _values_recorded(job, plan.stages, microbatches)
    plain = copied(job.model, {}) if num_parts > 1 else None
    world = fake_world(plan.mesh.rank(coord), plan.mesh.size)
    axes = world.axes(plan.mesh)
    _cut_parameters(job.model, plan, coord)
    shard = plan.batch_shard(coord)
    shard.set_num_tokens(num_tokens)
    job = job._replace(batch_shard=shard, rng=RngTracker(), deferred=DeferredGradients())
    job, _ = apply_in_turn([strategy for strategy in strategies if strategy.phase == "operators"], job, axes, plan)
    job.model.eval()
    chunked = plan.stages.chunked
    chunks = [prepare(job.model, chunked, number) for number in range(chunked.num_chunks)]
    edge_names = {value for edge in chunked.edges for value in edge.values}
    rehearsals, values = [], may_read_values(job.model)
    by_shapes: dict[tuple[object, ...], MicrobatchRehearsal] = {}  # equal microbatches are rehearsed once
    inside = mesh_axes("operators")  # over axes of model copies nothing is gathered
    for number, inputs in enumerate(microbatches):
        shard.set_microbatch(num_global, number, len(microbatches))
        key = (*(tensor.shape for tensor in _tensors(inputs)), *shard.counts(inside))
        if key not in by_shapes:
            crossed: dict[str, Any] = {}
            for chunk in chunks:
                on_meta_device = on_meta(job.model, values=values, spread=True)
                with torch.enable_grad(), on_meta_device, framed(job.frame, inputs) as frame_inputs:
                    by_name = {**bind(chunked, frame_inputs), **crossed}
                    run(chunk, by_name, chunked.before((lambda *_: None) if job.frame is None else job.frame.repeat))
                crossed.update({name: value for name, value in by_name.items() if name in edge_names})
            wholes: WholeShapes = {}
            if plain is not None:
                with framed(job.frame, inputs) as frame_inputs:
                    wholes = whole_shapes(plain, chunked, frame_inputs)
            scattered = {
                name: tuple(
                    tensor.shape == whole and may_scatter(tensor.numel(), num_parts)
                    for tensor, whole in zip(_tensors(crossed[name]), shapes, strict=True)
                )
                for name, shapes in wholes.items()
            }
            by_shapes[key] = MicrobatchRehearsal({name: crossed[name] for name in edge_names}, scattered=scattered)
        rehearsals.append(by_shapes[key])
    return tuple(rehearsals)


def _values_recorded(job: Job, stages: EventStages, microbatches: Sequence[Any]) -> tuple[MicrobatchRehearsal, ...]:
    """Returns the tensors that chunks send each other, as meta tensors, from a record of each microbatch's forward."""
    rehearsals, by_shapes = [], dict[tuple[object, ...], MicrobatchRehearsal]()
    computing, planned = replace(stages, model=job.model), _signature(stages.model, job.example)
    for inputs in microbatches:
        key = tuple(tensor.shape for tensor in _tensors(inputs))
        if key not in by_shapes:
            known = _signature(job.model, inputs) == planned  # then the record from which stages were cut fits inputs
            by_shapes[key] = MicrobatchRehearsal(
                _ghosts_crossing(stages.chunked if known else computing.with_inputs(inputs), stages.chunked)
            )
        rehearsals.append(by_shapes[key])
    return tuple(rehearsals)


def _ghosts_crossing(chunked: EventsChunked, planned: EventsChunked) -> dict[str, Any]:
    """Returns meta tensors like those that chunks send each other, by the names that the planned record has for them.

    Other inputs may take another path through the model's code, on which the same edge has other values.
    """
    by_name: dict[str, Any] = {}
    for pair, names in planned.values.items():
        named_ghosts = [(name, chunked.record.specs[name].ghost()) for name in chunked.values.get(pair, ())]
        ghosts = [ghost if name in chunked.record.learning else ghost.detach() for name, ghost in named_ghosts]
        same = len(ghosts) == len(names)
        by_name.update(
            zip(map(crossing_name, names), ghosts if same else [ghosts, *([] for _ in names[1:])], strict=True)
        )
    return by_name


def _signature(model: nn.Module, inputs: Any) -> tuple[object, ...]:
    """Returns all that a model's recorded forward depends on beside its code: mode, dtypes, and the inputs' shapes."""
    leaves, tree = tree_flatten(inputs)
    shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return model.training, [p.dtype for p in model.parameters()], shapes, tree


def _values_on_shards(
    job: Job, plan: Plan, strategies: Sequence[Strategy], microbatches: Sequence[Any], coord: Coord, num_parts: int
) -> tuple[MicrobatchRehearsal, ...]:
    """Runs all chunks of a model on tensor shards, forward and backward; returns the tensors sent between chunks.

    Dropout is off, so a value may be named differently than in training; it gets the name that its position on its edge
    has in the plan.
    """
    planned = plan.stages
    assert isinstance(planned, EventStages)
    stages = replace(planned, model=copied(job.model, {}).eval())
    world, alone = fake_world(plan.mesh.rank(coord), plan.mesh.size), fake_world(0, 1)
    _cut_parameters(job.model, plan, coord)
    job = job._replace(batch_shard=plan.batch_shard(coord), rng=RngTracker())
    job, _ = apply_in_turn([s for s in strategies if s.phase == "operators"], job, world.axes(plan.mesh), plan)
    checkpoint_activations(job, plan)
    job.model.eval()
    stage_of = (0,) * stages.num_chunks
    pipe = P2P(alone.axis("pp", [(0,)]))
    stage = GhostStage(job.model, stages, stage_of, pipe, lambda *_: None, job.frame)
    forwards = [Action("F", 0, chunk) for chunk in range(stages.num_chunks)]
    schedule = Schedule("rehearsal", ((*forwards, *(a._replace(kind="B") for a in reversed(forwards))),), stage_of, 1)
    rehearsals, by_shapes = [], dict[tuple[object, ...], MicrobatchRehearsal]()
    for inputs in microbatches:
        key = tuple(tensor.shape for tensor in _tensors(inputs))
        if key not in by_shapes:
            sent: dict[int, Sent] = {chunk: Counter() for chunk in range(stages.num_chunks)}
            starts: dict[int, Sequence[Tensor]] = {}
            # guess=True: checks in the user's code may read values that are not known, as when the model was recorded
            following = following_modules(job.model, world.recorder.enter_layer)
            with torch.enable_grad(), on_meta(job.model, guess=True, spread=True), following:
                stage.begin(schedule, [Microbatch(inputs, None, range(0), None)], _OutputSum(job.loss))
                for kind, number, chunk in schedule.actions[0]:
                    with world.recorder.recording() as records:
                        if kind == "F":
                            starts[chunk] = stage.forward(chunk, number)
                        else:
                            gradients = stage.gradients(chunk, number)
                            reached = [starts[chunk][place] for place in gradients]
                            if reached:
                                torch.autograd.backward(reached, tuple(gradients.values()))
                            stage.pass_back(chunk, number)
                    sent[chunk].update(records)
            values = stage.crossing(planned.chunked.edges)
            scattered = {
                name: (tagged(value) is None and may_scatter(value.numel(), num_parts),)
                for name, value in values.items()
            }
            by_shapes[key] = MicrobatchRehearsal(values, sent, scattered if num_parts > 1 else {})
        rehearsals.append(by_shapes[key])
    return tuple(rehearsals)


class _OutputSum:
    """A stand-in for the loss, from which a rehearsed backward starts: a loss cannot be called without targets.

    If a rank holds some classes of logits, it calls the loss with made-up class targets; otherwise it adds up all
    outputs.
    """

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """Returns a scalar that depends on every output that needs a gradient and that the loss reads."""
        learning = [start.sum() for start in starts_of(self.loss, output)]
        return torch.stack(learning).sum() if learning else torch.zeros((), requires_grad=True)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _cut_parameters(model: nn.Module, plan: Plan, coord: Coord) -> None:
    """Replaces every parameter and buffer by a meta tensor in the shape of this rank's shard; tied ones stay tied."""
    made: dict[str, nn.Parameter] = {}
    for _, module, own, name in list(owners(model)):
        whole = module._parameters[own]
        assert whole is not None
        if name not in made:
            held = torch.empty(plan.compute[name].local_shape(coord), dtype=whole.dtype, device="meta")
            made[name] = nn.Parameter(held, requires_grad=whole.requires_grad)
        module._parameters[own] = made[name]
    for path, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            layout = plan.buffers.get(f"{path}.{own}".lstrip("."))
            if layout is not None:
                module._buffers[own] = torch.empty(layout.local_shape(coord), dtype=buffer.dtype, device="meta")
