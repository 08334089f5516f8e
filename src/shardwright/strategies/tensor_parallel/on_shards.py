"""Tensor parallelism for any model: the user's own forward runs on tensor shards, cut as its operators allow.

Where the grid modes know only few layers of a model, its forward is recorded, and its parameters are cut along the axes
that are found in it (``graph_cuts.py``): heads, inner features of MLPs, groups. The model's own code then runs under
``shards_mode.py``. On a grid the axis of columns cuts these; over the other axes the samples are cut, and each weight
is sharded between steps and all-gathered when its module runs::

    x --whole--> | q, k, v: columns of whole heads | --attention of these heads--> | o: rows | --sum--> y

Traffic: for each layer whose input features are cut, one all-reduce of its output forward. For each tensor that cut
    layers read, one all-reduce of its gradient backward. For each operator that needs a whole tensor, an all-gather.
    For each weight that is sharded between steps, over each axis that shards it, one all-gather forward and one
    reduce-scatter of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.calls.checkpoint_calls import prepare_checkpoint
from shardwright.analysis.traced.batch_norms import batch_norms, derived_batch_norms
from shardwright.analysis.traced.structure import BATCH_NORMS, is_inside, kind_of, owners
from shardwright.comm.autograd import cut_to_shared
from shardwright.comm.axis import Axis
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.operators.batch_norm import share_statistics
from shardwright.plan.event_stages import EventStages
from shardwright.rng import DimSlice
from shardwright.sharding.tensor_shard import tag, tagged
from shardwright.strategies.tensor_parallel.output_shards import OutputShards
from shardwright.strategies.tensor_parallel.shards_frame import (
    CheckpointedCode,
    HeldShard,
    ShardsFrame,
    mark_fetched,
    run_on_shards,
    tag_all,
)
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote, StoredShards, runs_held


def apply_on_shards(
    model: nn.Module, loss: nn.Module, axes: Mapping[str, Axis], note: ShardsNote, by: str,
    stages: EventStages | None = None, recomputed: Collection[str] = (),
) -> ShardsFrame:  # fmt: skip
    """Wraps every module of a rank's model, and the loss, so that they run on tensor shards.

    With ``stages``, pipeline stages do not call the model itself: the :class:`ShardsFrame` that is returned does the
    same around the calls of a stage, and modules whose code the stages run call by call are not wrapped. Blocks that
    are ``recomputed`` all-gather again what the model had gathered around them.
    """
    if note.rows:
        norms = (*batch_norms(model), *derived_batch_norms(model))
        share_statistics((norm for _, norm in norms), [axes[name] for name in note.rows], by=by)
    mode = ShardsMode(axes[note.axis]) if note.axis is not None else None
    output = OutputShards(model, loss, mode, by, stages is not None) if mode is not None else None
    by_path: dict[str, list[HeldShard]] = {}
    for path, module, name, whole in owners(model):
        if whole in note.shards or whole in note.stored:
            stored = note.stored.get(whole)
            fetch = partial(_fetched, stored, axes) if stored is not None else None
            readers = stored.readers if stored is not None and stored.everywhere else ()
            held_shard = HeldShard(module, "_parameters", name, note.shards.get(whole), fetch, whole)
            by_path.setdefault("" if readers else path, []).append(held_shard)
            # A recomputation runs the block without the model's forward around it, so the block must gather by itself.
            for block in recomputed:
                if any(is_inside(reader, block) for reader in readers):
                    by_path.setdefault(block, []).append(held_shard._replace(again=True))
    buffers = []
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            held_shard = HeldShard(module, "_buffers", name, note.shards.get(f"{path}.{name}".lstrip(".")))
            if held_shard.shard is not None:
                by_path.setdefault(path, []).append(held_shard)
            if kind_of(module) not in BATCH_NORMS:  # BatchNorms write in place, and replace none
                buffers.append(held_shard)
    again = CheckpointedCode(mode, buffers)
    if mode is not None:
        mode.prepared = again.prepared
    tags = [shard for held in by_path.values() for shard in held if shard.fetch is None]
    opened = {"", *stages.opened} if stages is not None else set()
    for path, module in model.named_modules():
        if path in opened:
            continue
        mine = by_path.get(path, [])
        held = [*(shard for shard in mine if shard.fetch is not None), *tags] if path == "" else mine
        is_norm = kind_of(module) in BATCH_NORMS
        around = (
            partial(_norm_on_shards, mode, module, held, output, again)
            if is_norm and mode
            else partial(_on_shards, mode, held, path == "", output, buffers, again)
        )
        if path in note.gathered and mode is not None:
            around = partial(_gather_output, mode, held, output, again)
        wrap(module, Rung.ON_SHARDS, "its own code on shards of tensors", by=by, around=around)
    held = [shard for mine in by_path.values() for shard in mine]
    fetched = {name: [shard for shard in held if shard.whole == name and not shard.again] for name in note.stored}
    return ShardsFrame(
        mode,
        output,
        tags,
        fetched,
        frozenset(name for name, stored_shards in note.stored.items() if stored_shards.everywhere),
        buffers,
    )


def shard_of_drawn(rank: int, tensor: Tensor) -> tuple[tuple[DimSlice, ...], Callable[[Tensor], None]] | None:
    """Returns this rank's slices of a sharded tensor, and a function that marks another tensor as the same shard.

    Returns None for a whole tensor. ``rank`` is this rank's index on the axis that cuts the tensor. The function is the
    RNG tracker's ``shard_of``: a rank draws random numbers for its own elements only.
    """
    shard = tagged(tensor)
    if shard is None:
        return None
    cuts = ((dim, cut) for dim, cut in enumerate(shard.cuts) if cut is not None)
    return tuple(DimSlice(dim, len(cut), runs_held(cut, rank)) for dim, cut in cuts), lambda other: tag(other, shard)


def _on_shards(
    mode: ShardsMode | None, held: Sequence[HeldShard], is_model: bool, output: OutputShards | None,
    buffers: Sequence[HeldShard], again: CheckpointedCode, forward: Forward,
) -> Forward:  # fmt: skip
    tags = [shard for shard in held if shard.fetch is None]
    stored = [(shard, shard.fetch) for shard in held if shard.fetch is not None]

    @wraps(forward)
    def on_shards(*args: Any, **named: Any) -> Any:
        tag_all(tags)
        prepare_checkpoint(again.prepared)
        if not stored and not is_model and (mode is None or mode.depth):
            return forward(*args, **named)
        is_outermost = mode is not None and not mode.depth
        missing = [(shard, fetch) for shard, fetch in stored if not (shard.again and shard.is_at_hand)]
        running = run_on_shards(mode, buffers) if mode is not None and is_outermost else nullcontext()
        with again.around(missing), running:
            outputs = forward(*args, **named)
        if output is None:
            return outputs
        if is_model:
            return output.give(outputs)
        return output.give_outside(outputs) if is_outermost else outputs

    return on_shards


def _norm_on_shards(
    mode: ShardsMode, module: nn.Module, held: Sequence[HeldShard], output: OutputShards | None,
    again: CheckpointedCode, forward: Forward,
) -> Forward:  # fmt: skip
    """Wraps a BatchNorm to run on this rank's channels; statistics are shared only over axes that cut samples."""
    channels = next((held_shard.shard.cuts[0] for held_shard in held if held_shard.shard is not None), None)
    is_whole = not held and any(True for _ in chain(module.parameters(), module.buffers()))

    def on_shards(input: Tensor) -> Tensor:
        shard = tagged(input)
        if shard is not None and is_whole:  # a norm that the recorded forward does not call
            with torch._C.DisableTorchFunction():
                input = mode.whole(input)
        elif shard is None or channels is None or shard.cuts[1] != channels:
            return run(input)  # type: ignore[no-any-return]
        with torch._C.DisableTorchFunction():
            outputs: Tensor = forward(input)
        if not is_whole:
            tag(outputs, shard)
        return outputs

    run = _on_shards(mode, held, False, output, (), again, forward)
    return wraps(forward)(on_shards)


def _gather_output(
    mode: ShardsMode, held: Sequence[HeldShard], output: OutputShards | None, again: CheckpointedCode, forward: Forward
) -> Forward:  # fmt: skip
    """Wraps a module that is cut alone: this rank computes its part of the output, and gathers those of all ranks."""

    def gather_output(*args: Any, **named: Any) -> Any:
        outputs = forward(*args, **named)
        with torch._C.DisableTorchFunction():
            return tree_map_only(Tensor, mode.whole, outputs)

    return _on_shards(mode, held, False, output, (), again, wraps(forward)(gather_output))


def _fetched(stored: StoredShards, axes: Mapping[str, Axis], tensor: Tensor) -> Tensor:
    """Returns the whole of a weight that is sharded at rest, all-gathered from the fastest axis on.

    Its gradient is reduce-scattered.
    """
    with torch._C.DisableTorchFunction():
        for number in reversed(range(len(stored.axes))):
            place = 0
            for axis in (axes[name] for name in stored.axes[:number]):
                place = place * axis.size + axis.index
            tensor = cut_to_shared(tensor, axes[stored.axes[number]], stored.dim, stored.sizes[number][place])
        return mark_fetched(tensor)
