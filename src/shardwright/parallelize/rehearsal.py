"""What crosses between a pipeline's chunks, as one rank holds it: the model's forward rehearsed on the meta device.

The rank's own part of every layer runs, with ranks beside it that are not there, so that a value has the shape in
which tensor parallelism leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.arguments import bind
from shardwright.analysis.call_graph import prepare, run
from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.structure import owners
from shardwright.comm.backends.fake import fake_world
from shardwright.mesh import Coord
from shardwright.operators.deferred_gradients import DeferredGradients
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import BoundaryTensor
from shardwright.rng import RngTracker
from shardwright.strategies.pipeline.stage import framed
from shardwright.strategy import Strategy, apply_in_turn

Crossings = Mapping[str, tuple[BoundaryTensor, ...]]


def crossings(found: Sequence[Mapping[str, Any]]) -> tuple[Crossings, ...]:
    """By microbatch and value, the tensors of :func:`values_crossing`."""
    return tuple(
        {name: tuple(_crossing(leaf) for leaf in _tensors(value)) for name, value in each.items()} for each in found
    )


def values_crossing(
    job: Job,
    plan: Plan,
    strategies: Sequence[Strategy],
    microbatches: Sequence[Any],
    num_global: int,
    coord: Coord,
    num_tokens: int = 0,
) -> tuple[Mapping[str, Any], ...]:
    """By microbatch, the values that cross between chunks, on the meta device, by their names in the model's code.

    ``job.model`` and ``job.loss`` are changed, the model whole and on the meta device; ``microbatches`` are the rank's
    own inputs there, of a global batch of so many samples, each of so many tokens where ranks cut them.
    """
    assert plan.stages is not None, "placed"
    plan = replace(
        plan,
        compute={name: lies.on_all("pp") for name, lies in plan.compute.items()},
        buffers={name: lies.on_all("pp") for name, lies in plan.buffers.items()},
    )
    assert plan.stages is not None, "placed"
    world = fake_world(plan.mesh.rank(coord), plan.mesh.size)
    axes = world.axes(plan.mesh)
    _cut_parameters(job.model, plan, coord)
    shard = plan.batch_shard(coord)
    shard.set_num_tokens(num_tokens)
    job = job._replace(batch_shard=shard, rng=RngTracker(), deferred=DeferredGradients())
    job, _ = apply_in_turn([each for each in strategies if each.phase == "operators"], job, axes, plan)
    job.model.eval()
    chunked = plan.stages.chunked
    chunks = [prepare(job.model, chunked, chunk) for chunk in range(chunked.num_chunks)]
    wanted = {value for edge in chunked.edges for value in edge.values}
    found = []
    known: dict[tuple[object, ...], Mapping[str, Any]] = {}
    for number, inputs in enumerate(microbatches):
        shard.set_microbatch(num_global, number, len(microbatches))
        like = (*(tensor.shape for tensor in _tensors(inputs)), *shard.counts(plan.mesh.axes))
        if like in known:
            found.append(known[like])
            continue
        crossed: dict[str, Any] = {}
        for ready in chunks:
            with torch.enable_grad(), on_meta(job.model), framed(job.frame, inputs) as given:
                values = {**bind(chunked, given), **crossed}
                run(ready, values, chunked.before(_ignore if job.frame is None else job.frame.repeat))
            crossed.update({name: value for name, value in values.items() if name in wanted})
        known[like] = {name: crossed[name] for name in wanted}
        found.append(known[like])
    return tuple(found)


def _ignore(path: str, times: int, total: int) -> None:
    return None


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _crossing(tensor: Tensor) -> BoundaryTensor:
    return BoundaryTensor(tensor.numel() * tensor.element_size(), tensor.requires_grad)


def _cut_parameters(model: nn.Module, plan: Plan, coord: Coord) -> None:
    """Every parameter and buffer in the shape that this rank holds."""
    for _, module, own, name in list(owners(model)):
        whole = module._parameters[own]
        assert whole is not None
        held = torch.empty(plan.compute[name].local_shape(coord), dtype=whole.dtype, device="meta")
        module._parameters[own] = nn.Parameter(held, requires_grad=whole.requires_grad)
    for path, module in model.named_modules():
        for own, buffer in module.named_buffers(recurse=False):
            lies = plan.buffers.get(f"{path}.{own}".lstrip("."))
            if lies is not None:
                module._buffers[own] = torch.empty(lies.local_shape(coord), dtype=buffer.dtype, device="meta")
