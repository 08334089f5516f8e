"""Tensor parallelism for any model: the user's own forward on parts of its tensors, cut by what its operators do.

Where no layer of a model is one that the grid modes know, the model is recorded (``graph_cuts.py``) and its parameters
are cut along the axes found: heads, inner features of MLPs, groups. Its own code then runs under ``parts_mode.py``.

::

    x --whole--> | q, k, v: columns of whole heads | --attention of these heads--> | o: rows | --sum--> y

Traffic: per layer whose input is summed over, one all-reduce of its output forward; per tensor that cut layers read,
    one all-reduce of its gradient backward; an all-gather of what an operator needs whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.copying import copied
from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.meta_values import ValueReadError
from shardwright.analysis.module_calls import call_model
from shardwright.analysis.structure import owners
from shardwright.comm.axis import Axis
from shardwright.comm.backends.fake import fake_world
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.mesh import Coord
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic, sync_traffic
from shardwright.rng import DimSlice
from shardwright.runtime.activation_checkpointing import checkpoint_activations
from shardwright.sharding.box import Ranges
from shardwright.strategies.tensor_parallel.graph_cuts import graph_cuts
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.parts_mode import PartsMode
from shardwright.strategies.tensor_parallel.tensor_parts import TensorPart, held, tag, tagged

LEAST_SHARE = 0.2
"""The share of parameter elements that must be cut for a model to run on parts."""

ENOUGH = 0.5
"""The share from which on the layers that the grid modes know are cut as they are, and the model is not recorded."""


def share_cut(plan: Plan, mode: Mode) -> float:
    """Returns the share of a plan's parameter elements that the mode's axes cut."""
    names = {axis.name for axis in mode.axes}
    sizes = [(prod(layout.shape), not names.isdisjoint(layout.axes)) for layout in plan.compute.values()]
    return sum(size for size, cut in sizes if cut) / max(sum(size for size, _ in sizes), 1)


@dataclass(frozen=True, eq=False)
class PartsNote:
    """The parts of parameters and buffers that each rank of ``axis`` holds, by name, and the model, on meta."""

    axis: str
    parts: Mapping[str, TensorPart]
    model: nn.Module


def place_on_parts(job: Job, plan: Plan, mode: Mode, least: float) -> Plan | None:
    """Returns the plan with parameters cut along the axes of the model's run; None where less than ``least`` is cut.

    That takes an example of the inputs, one axis without ``sp`` or ``seq``, and no stages.
    """
    if job.example is None or plan.layout.factor("pp") is not None or len(mode.axes) != 1 or mode.row_axes or job.roles:
        return None
    (axis,) = mode.axes
    try:
        cuts = graph_cuts(job.model, job.example, axis.size)
    except (ValueReadError, RuntimeError, TypeError):  # the forward does not run without values
        return None
    if cuts.share < least:
        return None
    parts = {}
    for name, part in cuts.parts.items():
        (dim,) = (dim for dim, cut in enumerate(part.cuts) if cut is not None)
        ranges = _ranges(part.cuts[dim] or b"", axis.size)
        if name in plan.compute:
            plan = plan.cut(name, axis.name, dim, ranges)
        elif len(part.shape) == 1:
            plan = plan.cut_buffer(name, part.shape[0], axis.name, ranges)
        else:
            continue  # it is sliced where it is used
        parts[name] = part
    for path, module, own, name in owners(job.model):
        if name in parts:
            local, whole = parts[name].local_shape(0), tuple(parts[name].shape)
            plan = plan.role(path, mode.name, "parts", f"{own} {list(whole)}: {list(local)} on the first rank")
        elif path not in plan.roles:
            plan = plan.role(path, mode.name, "copied", f"{type(module).__name__}: every rank computes it whole")
    return plan.note("", PartsNote(axis.name, parts, job.model), by=mode.name, rung=Rung.ON_PARTS)


def _ranges(cut: bytes, size: int) -> Ranges:
    """The ranges of a dim that each index of the axis holds."""
    return tuple(_runs(cut, rank) for rank in range(size))


@lru_cache(maxsize=1024)
def _runs(cut: bytes, rank: int) -> tuple[tuple[int, int], ...]:
    numbered = enumerate(held(cut, rank))
    return tuple(
        (run[0], run[-1] + 1)
        for _, each in groupby(numbered, key=lambda pair: pair[1] - pair[0])
        for run in [[index for _, index in each]]
    )


def apply_on_parts(model: nn.Module, axis: Axis, note: PartsNote, by: str) -> PartsMode:
    """Lets every module of a rank's model run on parts; the model's outputs are gathered."""
    mode = PartsMode(axis)
    own: dict[str, list[tuple[dict[str, Any], str, TensorPart]]] = {}
    for path, module, name, whole_name in owners(model):
        if whole_name in note.parts:
            own.setdefault(path, []).append((module._parameters, name, note.parts[whole_name]))
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            part = note.parts.get(f"{path}.{name}".lstrip("."))
            if part is not None:
                own.setdefault(path, []).append((module._buffers, name, part))
    every = [each for tagged in own.values() for each in tagged]
    for path, module in model.named_modules():
        tags = every if path == "" else own.get(path, [])
        around = _around(mode, tags, is_model=path == "")
        wrap(module, Rung.ON_PARTS, "its own code on parts of tensors", by=by, around=around)
    return mode


def part_of_drawn(rank: int, tensor: Tensor) -> tuple[tuple[DimSlice, ...], Callable[[Tensor], None]] | None:
    """Returns the elements that a rank holds of a tensor, and a function that marks another as the same part.

    It is the RNG tracker's ``part_of``, so that a rank draws for the elements that it holds. None for a whole tensor.
    """
    part = tagged(tensor)
    if part is None:
        return None
    cuts = ((dim, cut) for dim, cut in enumerate(part.cuts) if cut is not None)
    return tuple(DimSlice(dim, len(cut), _runs(cut, rank)) for dim, cut in cuts), lambda other: tag(other, part)


def _around(
    mode: PartsMode, tags: list[tuple[dict[str, Any], str, TensorPart]], *, is_model: bool
) -> Callable[[Forward], Forward]:
    def around(forward: Forward) -> Forward:
        @wraps(forward)
        def on_parts(*args: Any, **named: Any) -> Any:
            for store, name, part in tags:  # another strategy may have put another tensor there
                if store[name] is not None:
                    tag(store[name], part)
            with nullcontext() if mode.depth else mode:
                outputs = forward(*args, **named)
            return tree_map_only(Tensor, mode.whole, outputs) if is_model else outputs

        return on_parts

    return around


def traffic_on_parts(plan: Plan, batch: StepCalls, coord: Coord, note: PartsNote) -> tuple[Traffic, ...]:
    """Computes the collectives of one step by a rehearsal of each microbatch on the meta device."""
    found: list[Traffic] = []
    size = plan.mesh[note.axis]
    by_shapes: dict[Any, list[Traffic]] = {}
    for inputs in batch.inputs:
        shapes = tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if shapes not in by_shapes:
            calls = _rehearsed(plan, note, coord, inputs)
            by_shapes[shapes] = [
                Traffic(kind, note.axis, bytes_, size, times) for (kind, bytes_), times in calls.items()
            ]
        found += by_shapes[shapes]
    return (*found, *sync_traffic(plan, batch, coord, note.axis))


def _empty_part(model: nn.Module, plan: Plan, coord: Coord) -> nn.Module:
    """Returns a copy of a model whose parameters and buffers are empty, in the shapes that a rank holds."""
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters():
        held = torch.empty(plan.compute[name].local_shape(coord), dtype=plan.compute_dtypes[name], device="meta")
        memo[id(p)] = nn.Parameter(held, requires_grad=p.requires_grad)
    for name, b in model.named_buffers():
        layout = plan.buffers.get(name)
        memo[id(b)] = b if layout is None else torch.empty(layout.local_shape(coord), dtype=b.dtype, device="meta")
    return copied(model, memo)


def _rehearsed(plan: Plan, note: PartsNote, coord: Coord, inputs: Any) -> Counter[tuple[str, int]]:
    """Counts the collectives of one microbatch's forward and backward, by kind and bytes."""
    model = _empty_part(note.model, plan, coord)
    world = fake_world(coord[note.axis], plan.mesh[note.axis])
    axis = world.axis(note.axis, [tuple(range(plan.mesh[note.axis]))])
    apply_on_parts(model, axis, note, "rehearsal")
    checkpoint_activations(Job(model, model), plan)
    model.eval()
    with world.recorder.recording() as records, torch.enable_grad(), on_meta(model):
        outputs = call_model(model, inputs)
        learning = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(learning, [torch.empty_like(leaf) for leaf in learning])
    return Counter((record.kind, record.num_bytes) for record in records)
