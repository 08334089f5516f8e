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

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, wraps
from itertools import chain, groupby, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.batch_norms import batch_norms, derived_batch_norms
from shardwright.analysis.checkpoint_calls import prepare_checkpoint
from shardwright.analysis.copying import copied
from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.module_calls import call_model
from shardwright.analysis.recording import Recording
from shardwright.analysis.running_module import following_modules
from shardwright.analysis.structure import BATCH_NORMS, has_hooks, is_inside, kind_of, owners
from shardwright.comm.autograd import cut_to_shared
from shardwright.comm.axis import Axis
from shardwright.comm.backends.fake import fake_world
from shardwright.comm.recorder import Record
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.mesh import Coord, balanced
from shardwright.operators.batch_norm import share_statistics
from shardwright.plan.event_stages import EventStages
from shardwright.plan.operator_work import operator_work
from shardwright.plan.plan import ActivationCut, Job, Plan
from shardwright.plan.schedule import Action
from shardwright.plan.shares import CutShare, shares
from shardwright.plan.traffic import Sent, StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.rng import DimSlice
from shardwright.runtime.activation_checkpointing import checkpoint_activations
from shardwright.sharding.box import Ranges
from shardwright.sharding.tensor_shard import ALL, TensorShard, held, tag, tagged
from shardwright.strategies.tensor_parallel.graph_cuts import GraphCuts, graph_cuts
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.output_shards import OutputShards, starts_of
from shardwright.strategies.tensor_parallel.sequence import cut_rows, is_asked
from shardwright.strategies.tensor_parallel.shards_frame import (
    HeldShard,
    ShardsFrame,
    mark_fetched,
    marks_of,
    run_on_shards,
    tag_all,
)
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode
from shardwright.strategy import check_samples_apart

LEAST_SHARE = 0.2
"""The least share of parameter bytes that must be cut for a model to run on tensor shards; else too much is copied.

Where the number comes from: of the first 103 models of docs/models.md under tp2, a record cut a third or more of each
that it cut at all.
"""

ENOUGH = 0.5
"""Half: a plan that tensor-parallelizes less than this share of a model's FLOPs is replaced by one that does, if any.

One that cuts ``GAIN`` more of them is also taken in its place.

It is also the share of parameter bytes from which a model with hooks or ``nn.MultiheadAttention`` keeps the plan for
known layers, whatever a recorded forward would cut.
Of the models of docs/models.md the known layers cut at most 0.43 or at least 0.57, so any share in between decides the
same there.
"""

GAIN = 0.2
"""A record must cut this much more of the parameter bytes than the known layers, or twice as much, to be used.

Where the known layers are less than half of the FLOPs (``ENOUGH``), this much more of those is enough too.

A record then cuts, for instance, all attentions of a model beside its known MLPs. Of the models of docs/models.md a
record cuts 0.21 more or above (the heads of every attention), or 0.19 and below (some of them).
"""


def share_cut(plan: Plan) -> float:
    """Returns the share of a plan's parameter bytes that tensor parallelism shards, from 0 to 1; 0 on one rank."""
    return next((each.share for each in _shares(plan)), 0.0)


def work_cut(plan: Plan) -> float:
    """Returns the share of the FLOPs of a plan's operators that tensor parallelism divides, from 0 to 1."""
    return next((each.flops or 0.0 for each in _shares(plan)), 0.0)


def _shares(plan: Plan) -> list[CutShare]:
    factor = str(plan.layout.factor("tp"))
    return [each for each in shares(plan) if each.factor == factor]


@dataclass(frozen=True)
class StoredShards:
    """How one weight is sharded between steps along ``dim``, over the axes that cut samples.

    It is all-gathered before use, as under FSDP. ``axes`` are slowest first. ``sizes[n][i][j]`` is the number of
    elements of ``dim`` at index j of ``axes[n]``, for index i on the axes before it (counted row-major).
    """

    dim: int
    axes: tuple[str, ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    everywhere: bool
    """Whether modules other than its own read the weight: then it is all-gathered for the whole forward."""
    readers: tuple[str, ...]
    """The modules that read the weight, by name."""


@dataclass(frozen=True, eq=False)
class ShardsNote:
    """The shards of parameters and buffers on each rank, by name, of a model that runs on tensor shards.

    ``shards`` are cut over ``axis``; ``stored`` are weights that are sharded at rest over the axes ``rows``. ``model``
    is the plain model on the meta device and ``loss`` its loss, from which traffic is rehearsed. ``gathered`` are
    the modules whose outputs are all-gathered at once. ``rehearsed`` caches a microbatch's collectives, for all ranks
    with the same shards and inputs.
    """

    axis: str | None
    rows: tuple[str, ...]
    shards: Mapping[str, TensorShard]
    stored: Mapping[str, StoredShards]
    model: nn.Module
    loss: nn.Module
    gathered: frozenset[str] = frozenset()
    rehearsed: dict[Any, Sent] = field(default_factory=dict)


def place_on_shards(job: Job, plan: Plan, mode: Mode, least: float) -> Plan | None:
    """Returns the plan to run the model's own forward on tensor shards, cut as its recorded operators allow, or None.

    It is None on one rank, if less than the share ``least`` of the parameter bytes would be cut, the forward cannot be
    recorded, the layout cuts tokens or pins roles, the user gave roles to layers, or several axes cut features. If one
    axis cuts features, it is None for a model with backward hooks, or with autograd functions that it calls for some
    numbers of samples alone. If an axis cuts samples, it is None for a model that reads parameters after it has
    selected by values, as one that calls experts.

    Raises: LayoutError: the layout cuts samples, and a layer mixes them.
    """
    tokens = mode.dim == 1 or is_asked(plan)
    if not mode.axes or job.graph is None or job.roles or tokens or mode.pinned:
        return None
    columns = [axis for axis in mode.axes if axis.stream != "T"]
    if len(columns) > 1 or (any(axis.stream == "C" for axis in columns) and mode.row_axes):
        return None
    name = columns[0].name if columns else None
    if columns and columns[0].size >= ALL:  # a label of one byte for each rank
        return None
    try:
        run = job.graph.run
        functions = {name for each in job.graph.every_run for name in each.recording.functions}
        functions -= run.recording.functions.keys()  # of which nothing is known where samples are many
    except Exception:  # a forward of the user's model, without values: whatever it raises, the model is not recorded
        return None
    if columns and (functions or any(m._backward_hooks or m._backward_pre_hooks for m in job.model.modules())):
        return None
    if mode.row_axes and _may_read_by_values(job.model, run.recording):
        return None  # ranks whose samples select other experts would gather other weights
    cuts = graph_cuts(job.model, run.recording, run.axes, columns[0].size if columns else 1)
    if mode.row_axes:
        check_samples_apart(job.model, str(plan.layout.factor("tp")), job.graph)
        plan = cut_rows(plan, mode)
    plan, shards = (plan, {}) if name is None else _cut_shards(plan, cuts.shards, name)
    own = _owners_of(job.model)
    # what is called for one sample after another is called as often as a rank has samples: nothing is gathered there
    plan, stored = _store_shards(plan, cuts, mode, shards, own, run.parameters_by_sample)
    if share_cut(plan) < least:
        return None
    for path, module, name_here, whole in owners(job.model):
        if whole in shards or whole in stored:
            held = list(plan.compute[whole].local_shape(dict.fromkeys(plan.mesh.axes, 0)))
            why = f"{name_here} {list(plan.compute[whole].shape)}: {held} on the first rank"
            why += ", of which the outputs are all-gathered" if path in cuts.gathered else ""
            plan = plan.role(path, mode.name, "parts", why)
        elif path not in plan.roles:
            plan = plan.role(path, mode.name, "copied", f"{type(module).__name__}: every rank computes it whole")
    rows = tuple(axis.name for axis in mode.row_axes)
    plan = replace(plan, work=operator_work(plan, run.recording, run.axes, cuts.gathered))
    note = ShardsNote(name, rows, shards, stored, job.model, job.loss, cuts.gathered)
    return plan.note("", note, by=mode.name, rung=Rung.ON_SHARDS)


def _may_read_by_values(model: nn.Module, recording: Recording) -> bool:
    """Returns whether values may decide which weights a forward reads: some are read after code has selected by values.

    Code may also have selected a path that the record has not taken: then a weight is not read at all.
    """
    if not recording.selecting:
        return False
    later = recording.calls[min(recording.selecting.values()) :]
    used = recording.parameters_used
    has_unread = any(name not in used and each.dim() > 1 for name, each in model.named_parameters())
    return has_unread or any(use.kind == "parameter" for call in later for use in call.operands)


def _cut_shards(plan: Plan, shards: Mapping[str, TensorShard], axis: str) -> tuple[Plan, dict[str, TensorShard]]:
    """Returns the plan with parameters and buffers cut over an axis, and the shards of those that were cut."""
    found = {}
    for name, shard in shards.items():
        (dim,) = (dim for dim, cut in enumerate(shard.cuts) if cut is not None)
        ranges = _ranges(shard.cuts[dim] or b"", plan.mesh[axis])
        if name in plan.compute:
            plan = plan.cut(name, axis, dim, ranges)
        elif len(shard.shape) == 1:
            plan = plan.cut_buffer(name, shard.shape[0], axis, ranges)
        else:
            continue  # it is sliced where it is used
        found[name] = shard
        path = name.rpartition(".")[0]
        if path in plan.statistics and path not in plan.activations:  # its statistics are those of this rank's channels
            plan = plan.cut_activation(path, ActivationCut(axis, 1, shard.shape[0], ranges))
    return plan, found


def _ranges(cut: bytes, size: int) -> Ranges:
    """Returns the ranges of a dim that each of ``size`` ranks holds; ``cut`` has the rank of each element."""
    return tuple(_runs(cut, rank) for rank in range(size))


@lru_cache(maxsize=1024)
def _runs(cut: bytes, rank: int) -> tuple[tuple[int, int], ...]:
    numbered = enumerate(held(cut, rank))
    return tuple(
        (run[0], run[-1] + 1)
        for _, each in groupby(numbered, key=lambda pair: pair[1] - pair[0])
        for run in [[index for _, index in each]]
    )


def _owners_of(model: nn.Module) -> Mapping[str, set[str]]:
    """Returns, for each parameter, the paths of the modules that hold it and read it in their own forward alone.

    Hooks run outside of the forward, so a module that has any is left out: ``nn.utils.spectral_norm`` is such a hook.
    """
    own: defaultdict[str, set[str]] = defaultdict(set)
    for path, module, _, name in owners(model):
        if not has_hooks(module):
            own[name].add(path)
    return own


def _store_shards(
    plan: Plan, cuts: GraphCuts, mode: Mode, shards: Mapping[str, TensorShard], own: Mapping[str, set[str]],
    apart: Collection[str],
) -> tuple[Plan, dict[str, StoredShards]]:  # fmt: skip
    """Returns the plan with weights, except ``apart``, sharded over the axes that cut samples in their longest dim."""
    names = tuple(axis.name for axis in mode.row_axes)
    count = prod(axis.size for axis in mode.row_axes)
    found = {}
    for name, layout in plan.compute.items() if count > 1 else ():
        taken = [dim for dim, cut in enumerate(shards[name].cuts) if cut is not None] if name in shards else []
        free = [dim for dim, size in enumerate(layout.shape) if dim not in taken and size >= count]
        if len(layout.shape) < 2 or not free or name in cuts.held or name in apart:
            continue  # every rank holds a copy, and the gradient is summed
        dim = max(free, key=lambda each: layout.shape[each])
        pieces, sizes = [(0, layout.shape[dim])], []
        for axis in mode.row_axes:
            cuts_of = ((start, pairwise(balanced(stop - start, axis.size))) for start, stop in pieces)
            split = [[(start + a, start + b) for a, b in each] for start, each in cuts_of]
            ranges = tuple(tuple(each[index] for each in split) for index in range(axis.size))
            plan = plan.cut(name, axis.name, dim, ranges)
            sizes.append(tuple(tuple(b - a for a, b in each) for each in split))
            pieces = [piece for each in split for piece in each]
        readers = cuts.readers.get(name, set()) | own[name]
        found[name] = StoredShards(dim, names, tuple(sizes), bool(readers - own[name]), tuple(sorted(readers)))
    return plan, found


# ---- on a rank


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
    own: dict[str, list[HeldShard]] = {}
    for path, module, name, whole in owners(model):
        if whole in note.shards or whole in note.stored:
            stored = note.stored.get(whole)
            fetch = partial(_fetched, stored, axes) if stored is not None else None
            readers = stored.readers if stored is not None and stored.everywhere else ()
            held_shard = HeldShard(module, "_parameters", name, note.shards.get(whole), fetch, whole)
            own.setdefault("" if readers else path, []).append(held_shard)
            # a backward runs a block again without the model around it
            for block in recomputed:
                if any(is_inside(reader, block) for reader in readers):
                    own.setdefault(block, []).append(held_shard._replace(again=True))
    buffers = []
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
            held_shard = HeldShard(module, "_buffers", name, note.shards.get(f"{path}.{name}".lstrip(".")))
            if held_shard.shard is not None:
                own.setdefault(path, []).append(held_shard)
            if kind_of(module) not in BATCH_NORMS:  # they write to theirs in place
                buffers.append(held_shard)
    tags = [each for held in own.values() for each in held if each.fetch is None]
    opened = {"", *stages.opened} if stages is not None else set()
    for path, module in model.named_modules():
        if path in opened:
            continue
        mine = own.get(path, [])
        held = [*(each for each in mine if each.fetch is not None), *tags] if path == "" else mine
        is_norm = kind_of(module) in BATCH_NORMS
        around = (
            partial(_norm_on_shards, mode, module, held, output)
            if is_norm and mode
            else partial(_on_shards, mode, held, path == "", output, buffers)
        )
        if path in note.gathered and mode is not None:
            around = partial(_gather_output, mode, held, output)
        wrap(module, Rung.ON_SHARDS, "its own code on shards of tensors", by=by, around=around)
    held = [each for mine in own.values() for each in mine]
    fetched = {name: [each for each in held if each.whole == name and not each.again] for name in note.stored}
    return ShardsFrame(
        mode,
        output,
        tags,
        fetched,
        frozenset(name for name, each in note.stored.items() if each.everywhere),
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
    return tuple(DimSlice(dim, len(cut), _runs(cut, rank)) for dim, cut in cuts), lambda other: tag(other, shard)


def _on_shards(
    mode: ShardsMode | None, held: Sequence[HeldShard], is_model: bool, output: OutputShards | None,
    buffers: Sequence[HeldShard], forward: Forward,
) -> Forward:  # fmt: skip
    tags = [each for each in held if each.fetch is None]
    stored = [(each, each.fetch) for each in held if each.fetch is not None]

    @wraps(forward)
    def on_shards(*args: Any, **named: Any) -> Any:
        tag_all(tags)
        prepare_checkpoint(marks_of)
        if not stored and not is_model and (mode is None or mode.depth):
            return forward(*args, **named)
        is_outermost = mode is not None and not mode.depth
        missing = [(each, fetch) for each, fetch in stored if not (each.again and each.is_at_hand)]
        before = [(each, fetch, each.store[each.name]) for each, fetch in missing]
        for each, fetch, tensor in before:
            each.store[each.name] = fetched = fetch(tensor)
            fetched._is_param = True  # what torch and code take for a parameter
            tag(fetched, each.shard)
        try:
            with run_on_shards(mode, buffers) if mode is not None and is_outermost else nullcontext():
                outputs = forward(*args, **named)
        finally:
            for each, _, tensor in before:
                each.store[each.name] = tensor
        if output is None:
            return outputs
        if is_model:
            return output.give(outputs)
        return output.give_outside(outputs) if is_outermost else outputs

    return on_shards


def _norm_on_shards(
    mode: ShardsMode, module: nn.Module, held: Sequence[HeldShard], output: OutputShards | None, forward: Forward
) -> Forward:  # fmt: skip
    """Wraps a BatchNorm to run on this rank's channels; statistics are shared only over axes that cut samples."""
    channels = next((each.shard.cuts[0] for each in held if each.shard is not None), None)
    is_whole = not held and any(True for _ in chain(module.parameters(), module.buffers()))

    def on_shards(input: Tensor) -> Tensor:
        shard = tagged(input)
        if shard is not None and is_whole:  # the recorded forward does not call it
            with torch._C.DisableTorchFunction():
                input = mode.whole(input)
        elif shard is None or channels is None or shard.cuts[1] != channels:
            return run(input)  # type: ignore[no-any-return]
        with torch._C.DisableTorchFunction():
            found: Tensor = forward(input)
        if not is_whole:
            tag(found, shard)
        return found

    run = _on_shards(mode, held, False, output, (), forward)
    return wraps(forward)(on_shards)


def _gather_output(
    mode: ShardsMode, held: Sequence[HeldShard], output: OutputShards | None, forward: Forward
) -> Forward:
    """Wraps a linear layer to compute this rank's output features and to gather those of all ranks."""

    def gather_output(input: Tensor) -> Tensor:
        features = forward(input)
        with torch._C.DisableTorchFunction():
            return mode.whole(features)

    return _on_shards(mode, held, False, output, (), wraps(forward)(gather_output))


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


# ---- traffic


def traffic_on_shards(plan: Plan, batch: StepCalls, coord: Coord, note: ShardsNote, mode: Mode) -> tuple[Traffic, ...]:
    """Returns one step's collectives of the rank at ``coord``: each microbatch's, then those of gradient sync.

    Those of a microbatch are counted in a rehearsal on meta tensors; under a pipeline ``batch.sent`` has the counts.
    """
    found: list[Traffic] = []
    # ranks that hold as much and gather as much from each of the others send the same
    held = tuple(layout.local_shape(coord) for layout in (*plan.compute.values(), *plan.buffers.values()))
    place = tuple(coord[name] for name in note.rows[:-1])
    for number, alike in batch.kinds().items():
        if plan.schedule is not None:
            sent = _of_stage(plan, batch.sent[number], coord)
            found += [
                _traffic_of(call, plan, times * alike) for call, times in sent.items() if call.source == mode.name
            ]
            continue
        inputs = batch.inputs[number]
        key = place, held, tuple(leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        if key not in note.rehearsed:
            note.rehearsed[key] = _rehearsed(plan, note, coord, inputs)
        found += [_traffic_of(call, plan, times * alike) for call, times in note.rehearsed[key].items()]
    found += [each for axis in mode.axes for each in sync_traffic(plan, coord, axis.name)]
    found += [each for axis in mode.row_axes for each in statistics_traffic(plan, batch, coord, axis.name)]
    return tuple(found)


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
    except Exception:  # of the user's own code: a check that has failed, as where the forward was recorded
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
