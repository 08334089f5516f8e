"""States what a model that runs on tensor shards sends, by a rehearsal of its forward on the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.calls.running_module import following_modules
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.comm.backends.fake import fake_world
from shardwright.comm.recorder import Record
from shardwright.mesh import Coord
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Action
from shardwright.plan.traffic import Sent, StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.runtime.activation_checkpointing import checkpoint_activations
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.on_shards import apply_on_shards
from shardwright.strategies.tensor_parallel.output_shards import starts_of
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote


def traffic_on_shards(plan: Plan, batch: StepCalls, coord: Coord, note: ShardsNote, mode: Mode) -> tuple[Traffic, ...]:
    """Returns one step's collectives of the rank at ``coord``: each microbatch's, then those of gradient sync.

    Those of a microbatch are counted in a rehearsal on meta tensors; under a pipeline ``batch.sent`` has the counts.
    """
    collectives: list[Traffic] = []
    # ranks send the same if they hold as much, and gather as much from each other rank
    held = tuple(layout.local_shape(coord) for layout in (*plan.compute.values(), *plan.buffers.values()))
    place = tuple(coord[name] for name in note.rows[:-1])
    for number, alike in batch.kinds().items():
        if plan.schedule is not None:
            sent = _of_stage(plan, batch.sent[number], coord)
            collectives += [
                _traffic_of(call, plan, times * alike) for call, times in sent.items() if call.source == mode.name
            ]
            continue
        inputs = batch.inputs[number]
        key = place, held, tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if key not in note.rehearsed:
            note.rehearsed[key] = _rehearsed(plan, note, coord, inputs)
        collectives += [_traffic_of(call, plan, times * alike) for call, times in note.rehearsed[key].items()]
    collectives += [collective for axis in mode.axes for collective in sync_traffic(plan, coord, axis.name)]
    collectives += [
        collective for axis in mode.row_axes for collective in statistics_traffic(plan, batch, coord, axis.name)
    ]
    return tuple(collectives)


def _traffic_of(call: Record, plan: Plan, times: int) -> Traffic:
    return Traffic(call.kind, call.axis, call.num_bytes, plan.mesh[call.axis], times, layer=call.layer)


def _of_stage(plan: Plan, sent: Mapping[int, Sent], coord: Coord) -> Sent:
    """Returns the collectives of all chunks of the stage at ``coord``, counted together."""
    assert plan.schedule is not None
    return sum((sent[chunk] for chunk in plan.schedule.chunks_of(coord["pp"])), Counter())


def _empty_part(model: nn.Module, plan: Plan, coord: Coord) -> nn.Module:
    """Returns a copy of a model on the meta device, with parameters and buffers in this rank's shapes."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters():
        held = torch.empty(plan.compute[name].local_shape(coord), dtype=plan.compute_dtypes[name], device="meta")
        memo[id(p)] = nn.Parameter(held, requires_grad=p.requires_grad)
    for name, b in model.named_buffers():
        layout = plan.buffers.get(name)
        memo[id(b)] = b if layout is None else torch.empty(layout.local_shape(coord), dtype=b.dtype, device="meta")
    return copied(model, memo)


def _rehearsed(plan: Plan, note: ShardsNote, coord: Coord, inputs: Any) -> Sent:
    """Returns how often each collective is called in one microbatch's forward and backward, on the meta device."""
    try:
        return _rehearsed_with(plan, note, coord, inputs, guess=False)
    except Exception:  # e.g. a check in the user's code: then values are guessed, as in the record
        return _rehearsed_with(plan, note, coord, inputs, guess=True)


def _rehearsed_with(plan: Plan, note: ShardsNote, coord: Coord, inputs: Any, *, guess: bool) -> Sent:
    model = _empty_part(note.model, plan, coord)
    world = fake_world(plan.mesh.rank(coord), plan.mesh.size)
    loss = copied(note.loss, {})
    output = apply_on_shards(model, loss, world.axes(plan.mesh), note, "rehearsal", recomputed=plan.recomputed).output
    checkpoint_activations(Job(model, model), plan)
    model.eval()
    in_step = nullcontext() if output is None else output.during(Action("F", 0))
    following = following_modules(model, world.recorder.enter_layer)
    with world.recorder.recording() as records, torch.enable_grad(), on_meta(model, guess=guess), in_step, following:
        outputs = call_model(model, inputs)
        learning = starts_of(loss, outputs)
        torch.autograd.backward(learning, [torch.empty_like(leaf) for leaf in learning])
    return Counter(records)
