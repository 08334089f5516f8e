"""Plans where each tensor of a plain model lies under a layout, and computes what a step sends, before anything runs.

Planning is pure: it works on the meta device, sends no messages, and gives the same plan on every rank.
``parallelize``, ``verify``, ``show``, the ledger and the trainer start here. The helpers that split batches (``rows``,
``num_rows``) and move them (``on_device``) are here too, because planning and training must split a batch alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from threading import RLock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.model_graph import ModelGraph, RecordStore
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.objects.held_parameters import AttributeOf, put_unread
from shardwright.analysis.objects.marked_inputs import map_samples, marks_in, packed_in, sample_tensors
from shardwright.analysis.objects.reached import unregistered
from shardwright.analysis.on_meta.meta_values import keep_values
from shardwright.analysis.on_meta.module_calls import ModuleCall, ModuleCalls, record_module_calls
from shardwright.analysis.on_meta.operator_results import cloned, tensors_of
from shardwright.analysis.traced.batch_norms import ignore_batch_statistics
from shardwright.analysis.traced.kept_traces import traces_kept
from shardwright.axes import layout_axes, mesh_axes
from shardwright.errors import EXAMPLE, GridError, LayoutError, PlanError, ShardError, UnknownCodeError
from shardwright.forward_stack import Rung
from shardwright.initial_values import keep_record
from shardwright.layout import Layout, has_stages
from shardwright.mesh import Coord
from shardwright.parallelize.auto import num_shares, samples_of, settle, with_suggestions
from shardwright.parallelize.checks import check_held, check_microbatches, check_renormed, check_settings_of_calls
from shardwright.parallelize.loss_watch import note_reads
from shardwright.parallelize.rank_check import check_traffic
from shardwright.parallelize.rehearsal import MicrobatchRehearsal, crossings, values_crossing
from shardwright.plan.alike_ranks import AlikeRanks
from shardwright.plan.batch_shard import BatchShard, held_sizes, microbatch_samples, num_tokens_of
from shardwright.plan.compiled import compiled_blocks
from shardwright.plan.layer_overrides import overrides_of
from shardwright.plan.operator_work import operator_work
from shardwright.plan.plan import NUM_TOKENS, Job, Plan
from shardwright.plan.recompute import activation_offload_target, called_modules, count_recomputation, recomputed_blocks
from shardwright.plan.shares import CutShare, shares
from shardwright.plan.traffic import StepCalls, Traffic, different
from shardwright.runtime.copy_stream import CopyStream
from shardwright.runtime.empty_batches import support_empty_batches
from shardwright.runtime.mixed_precision import cast_buffers, cast_to_compute
from shardwright.strategies import choose
from shardwright.strategies.pipeline.cut import stages_by_device
from shardwright.strategies.tensor_parallel.place import sent
from shardwright.strategy import Strategy, check_own_writes, cuts_of_traffic

PLANNING = RLock()
"""Held while a rank plans, so that ranks that are threads plan one after another.

Code of the model that runs while it is copied may trace itself by ``torch.fx``, which patches ``nn.Module`` in all
threads.
"""


def copied_loss(loss: nn.Module, model: nn.Module | None = None, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a copy of a loss with buffers of its own, such as a running mean: ranks that are threads share no buffer.

    Parameters share memory with those of ``loss``. If the loss refers to modules of the plain ``model``, their copies
    are noted (:func:`~shardwright.parallelize.loss_watch.note_reads`). ``memo``, of :func:`structural_copy`, has the
    copies of objects that are copied already: where the loss refers to one of these objects, its copy refers to theirs.

    Raises: PlanError: the loss holds the model of another run, of which this rank has parts.
    """
    memo = {} if memo is None else memo
    try:
        copy = structural_copy(
            loss, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.clone(), memo
        )
    except ShardError as failure:
        raise PlanError(
            "the loss holds the model of a run, of which this rank has parts",
            given=f"{type(loss).__name__}; {failure.given}",
            allowed="frozen modules that are whole on each rank, such as the model of a run under dp",
            fix="in a GAN, lay the discriminator out by dp: its ranks have all of it",
        ) from failure
    if model is not None:
        note_reads(copy, model, memo)
    return copy


def without_storage(model: nn.Module) -> nn.Module:
    """Returns a copy of the model on the meta device: new modules, tensors with shapes and without values."""
    return structural_copy(model, lambda tensor: tensor.to("meta"))


def structural_copy(
    model: nn.Module, seen_as: Callable[[Tensor], Tensor] = Tensor.detach, memo: dict[int, Any] | None = None
) -> nn.Module:
    """Returns a copy of a model with new modules whose tensors share memory with the original's.

    ``seen_as(tensor)`` returns the tensor that the copy has in place of a parameter or buffer, by default a view of it.
    Tied tensors stay tied. Modules that the model holds in a plain list or a closure, without registering them, are
    copied too. Sparse buffers that no checkpoint has are plain attributes of the copy. All copies are added to
    ``memo``, by the ids of the originals.

    Raises: PlanError: a function that holds a part of the model, as in a closure, cannot be rebuilt for the copy.
    """
    memo = {} if memo is None else memo
    for root in (model, *unregistered(model)):
        for p in root.parameters():
            if id(p) not in memo:
                memo[id(p)] = keep_record(p, nn.Parameter(seen_as(p).detach(), requires_grad=p.requires_grad))
        for b in root.buffers():
            if id(b) not in memo and b.layout != torch.strided:
                memo[id(b)] = b.detach().clone()
            elif id(b) not in memo:
                memo[id(b)] = keep_values(b, keep_record(b, seen_as(b).detach()))
    copy = copied(model, memo)
    for module in copy.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.layout != torch.strided and name in module._non_persistent_buffers_set:
                del module._buffers[name]
                vars(module)[name] = buffer
    return copy


@traces_kept()
def make_plan(
    job: Job, layout: Layout, strategies: Sequence[Strategy] | None = None
) -> tuple[Plan, tuple[Strategy, ...]]:
    """Returns the plan of a model under a layout, and the strategies that have refined it, in order.

    ``strategies`` are by default those that the layout selects. ``tp8/auto`` in the layout is replaced by the mode and
    grid that send the least, or whose messages take least time on the job's cluster if it has one.

    Raises: LayoutError, PlanError: the model cannot have this layout; no message has been sent by then.
    """
    layout = settle(layout, partial(_messages_cost, job))
    strategies = choose(layout) if strategies is None else tuple(strategies)
    on_meta = job._replace(model=without_storage(job.model))
    put_unread(on_meta.model, lists_to_replace(job, layout))
    reads_values = job.graph is not None and job.graph.reads_values
    if job.graph is not None and reads_values:
        on_meta = on_meta._replace(example=job.graph.values)
    check_microbatches(on_meta.model, layout, job.graph)
    overrides_of(on_meta)  # called here so that unknown names of layers are errors under any layout
    blocks = recomputed_blocks(on_meta.model, layout)
    try:
        plan = _placed(on_meta, layout, strategies)
    except UnknownCodeError as failure:
        if job.example is None:  # recorded on an example, any code can be cut
            fix = str(failure.fix) if EXAMPLE in str(failure.fix) else f"{EXAMPLE}; or {failure.fix}"
            known = {"given": failure.given, "allowed": failure.allowed}
            raise UnknownCodeError(failure.what, **known, fix=fix) from None  # the same error with a simpler fix
        if not has_stages(layout):
            raise
        plan = _placed(on_meta._replace(recorded=True), layout, strategies)
    check_settings_of_calls(job.graph, layout)
    check_renormed(on_meta.model, plan)
    check_held(on_meta.model, plan, is_recorded=job.graph is not None)
    rounded = [name for name, dtype in plan.stored_dtypes.items() if dtype != plan.compute_dtypes[name]]
    check_own_writes(job.graph, rounded, "mixed precision", "rounds from a master weight", converted=True)
    if plan.stages is not None:
        blocks = called_modules(on_meta.model, blocks, plan.stages.called())
    offloads = activation_offload_target(layout) is not None
    for path in blocks:
        plan = plan.wraps(path, Rung.OFFLOAD if offloads else Rung.RECOMPUTE, "core")
    compiled = compiled_blocks(on_meta.model, plan)
    for path in compiled:
        plan = plan.wraps(path, Rung.COMPILE, "core")
    reads_values = reads_values or (job.graph is not None and job.graph.selects_by_values)
    plan = replace(plan, compiled=compiled, reads_values=reads_values)
    if offloads:
        return replace(plan, offloaded_activations=blocks), strategies
    return replace(plan, recomputed=blocks), strategies


def lists_to_replace(job: Job, layout: Layout) -> tuple[AttributeOf, ...]:
    """Returns the attributes whose lists must not hold parameters, because ranks have parts and no forward reads them.

    There are none if each rank has every parameter whole, or without an example.
    """
    is_whole = all(factor.axis == "dp" and not factor.options for factor in layout.factors)
    return () if is_whole or job.graph is None else job.graph.unread_lists


def shares_of(job: Job, plan: Plan) -> tuple[CutShare, ...]:
    """Returns the share of parameters and FLOPs that each factor of the layout shards.

    If the layout has ``tp`` and the plan does not count the FLOPs of operators yet, a forward on the job's example is
    recorded on the meta device to count them. Without an example, or if that forward fails, shares of FLOPs may be
    None. If the forward fails, low shares give the reason.
    """
    if job.graph is None or plan.layout.factor("tp") is None:
        return shares(plan)
    if not plan.work:
        with suppress(Exception):  # an error of the user's forward must not end rank 0, which alone runs it for its log
            run = job.graph.run
            plan = replace(plan, work=operator_work(plan, run.recording, run.axes))
    return shares(plan, unrecorded=job.graph.failure)


def _placed(job: Job, layout: Layout, strategies: Sequence[Strategy]) -> Plan:
    """Returns the plan after each strategy in turn has refined it."""
    plan = Plan.of(job, layout)
    for strategy in strategies:
        try:
            plan = strategy.place(job, plan)
        except GridError as error:
            raise with_suggestions(error, job, layout) from None
    return plan


def _messages_cost(job: Job, layout: Layout) -> float:
    """Returns what rank 0, which has the largest shards, spends on messages in a step of the layout without stages.

    It is the seconds of its messages on the job's cluster, one after the other, or without a cluster their bytes.
    Without an example a batch is known by its tokens only: then it returns the elements that linear layers send.
    """
    # stages are left out: their messages are small beside those of layers, and cutting the model for each mode is slow
    factors = tuple(factor for factor in layout.factors if layout_axes()[factor.axis].kind != "stages")
    layout = replace(layout, factors=factors)
    plan, strategies = make_plan(job, layout)
    if job.example is None:
        return sent(plan)
    example = job.graph.values if job.graph is not None and plan.reads_values else job.example
    inputs = map_samples(example, lambda t: t.repeat(num_shares(layout), *(1 for _ in t.shape[1:])))
    by_strategy = StepTraffic(job, plan, strategies, inputs).at(dict.fromkeys(plan.mesh.axes, 0))
    if job.cluster is None:
        return sum(call.sent_bytes for traffic in by_strategy.values() for call in traffic)
    return sum(
        call.times * job.cluster.message_s(call.kind, call.num_bytes, plan.mesh.group(call.axis.split("+"), 0))
        for traffic in by_strategy.values()
        for call in traffic
    )


def job_for(
    model: nn.Module,
    loss: nn.Module,
    layout: Layout,
    inputs: Any = None,
    num_tokens: int = NUM_TOKENS,
    roles: Mapping[str, str] = MappingProxyType({}),
    kept: RecordStore | None = None,
) -> Job:
    """Returns the :class:`Job` (model, loss, sizes) for planning with batches like ``inputs``, a global batch.

    Of ``inputs`` only shapes and dtypes are read, and values if the model's code needs them. ``num_tokens`` is the
    number of tokens in one microbatch of one model copy. ``roles`` are the user's choices of "column", "row" or
    "copied" for layers, by patterns of names. Jobs that are given the same ``kept`` share what is recorded of a model.

    Raises: LayoutError: the tensors of ``inputs`` have different numbers of samples, or none; or, with pipeline stages,
        the parameters are on several devices and the model cannot be cut where the device changes.

    >>> job_for(nn.Linear(3, 3), nn.Identity(), Layout.parse("dp2 mb2"), torch.zeros(8, 3)).example.shape
    torch.Size([2, 3])
    """
    example, graph, num_samples = None, None, samples_of(inputs, layout)
    if inputs is not None:
        share = rows(inputs, 0, -(-num_rows(inputs) // num_shares(layout)))
        example = on_device(share, torch.device("meta"))
        has_values = not any(tensor.is_meta for tensor in tensors_of(share))
        values = on_device(share, torch.device("cpu")) if has_values else None
        graph = ModelGraph(model, example, values, kept=RecordStore() if kept is None else kept)
    stages = stages_by_device(model) if has_stages(layout) else ()
    return Job(model, loss, num_tokens, num_samples, roles, example, graph, stages)


def rows(tree: Any, start: int, stop: int) -> Any:
    """Returns a batch with only the samples ``start`` to ``stop`` - 1 (dim 0) of every tensor, as views.

    Tensors that are marked as whole stay as they are. Views of tensors that require no gradient have a version counter
    of their own, which the views of one tensor share. So autograd does not take the inputs of other calls for changed
    if a forward writes to its own.
    """
    own: dict[int, Tensor] = {}  # by storage, because several entries of a batch may be one tensor

    def cut(tensor: Tensor) -> Tensor:
        if tensor.requires_grad or tensor.layout is not torch.strided:
            return tensor[start:stop]
        base = own.setdefault(tensor.untyped_storage()._cdata, tensor.data)
        if base.dtype != tensor.dtype:
            return tensor[start:stop]
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())[start:stop]

    return map_samples(tree, cut)


def num_rows(tree: Any) -> int:
    """Returns the number of samples (dim 0) of a batch.

    Raises: LayoutError: the tensors of the batch have different numbers of samples, a tensor has no dims, or there are
        no tensors.
    """
    shapes = [tuple(tensor.shape) for tensor in sample_tensors(tree)]
    sizes = {shape[0] for shape in shapes if shape} | {mark.num_samples for mark in packed_in(tree)}
    if len(sizes) != 1 or () in shapes:
        raise LayoutError(
            "the tensors of a batch have different numbers of samples, or none",
            given=f"tensors of shapes {', '.join(map(str, shapes))}"
            if shapes
            else f"no tensors{' but those that sw.whole marks' if marks_in(tree) else ''}",
            allowed="one number in dim 0 of all",
            fix="give each tensor of the batch, at least one, the samples in dim 0; in each batch and in the example "
            "write sw.samples_in(tensor, 1) for one of (time, samples), sw.whole(tensor) for one that is the same for "
            "all samples, such as positions, sw.packed(tensor, counts) for one in which sample i has counts[i] rows, "
            "such as patches of pictures, and sw.per_sample(values) for a list with an entry for each sample, such as "
            "pictures of several sizes",
        )
    return sizes.pop()


class StepTraffic:
    """Computes what any rank sends in one training step on the global batch ``inputs``, as the strategies state it.

    ``show``, ``verify`` and the tests use it. The calls of the model's modules are recorded on the meta device, once
    for all microbatches of the same shapes, and messages are computed once for all ranks that send alike
    (``plan/alike_ranks.py``).
    """

    def __init__(self, job: Job, plan: Plan, strategies: Sequence[Strategy], inputs: Any) -> None:
        self.job, self.plan, self.strategies = job, plan, tuple(strategies)
        self._whole = narrow_model(without_storage(job.model), plan)
        ignore_batch_statistics(self._whole)
        support_empty_batches(self._whole)
        device = "cpu" if plan.reads_values else "meta"
        self._inputs = tree_map_only(Tensor, lambda tensor: cast_to_compute(tensor.to(device), plan), inputs)
        self._num_samples, self._num_tokens = num_rows(inputs), num_tokens_of(inputs) if plan.token_axes else 0
        self._trained = {use.module for use in plan.uses if use.parameter not in plan.frozen}
        self._calls_by_shapes: dict[tuple[torch.Size, ...], ModuleCalls] = {}
        self._crossings: dict[tuple[object, ...], tuple[MicrobatchRehearsal, ...]] = {}
        self._said: dict[tuple[int, ...], dict[str, tuple[Traffic, ...]]] = {}

    @cached_property
    def _alike(self) -> AlikeRanks:
        cuts = [cuts_of_traffic(strategy, self.plan) for strategy in self.strategies]
        return AlikeRanks(self.plan, cuts, self._num_samples, self._num_tokens, self._parted_elements)

    def like(self, coord: Coord) -> Coord:
        """Returns the coordinate of a rank that sends the same as the one at ``coord``, one for all such ranks."""
        return self._alike.like(coord)

    def at(self, coord: Coord, *, checked: bool = False) -> dict[str, tuple[Traffic, ...]]:
        """Returns the collectives and sends of one step on the rank at ``coord``, by name of the strategy.

        They are computed once for all ranks that send alike. With ``checked``, ranks are compared in this step
        (``check_every`` of ``parallelize``), and the result also has the collectives of that comparison, under "core".
        """
        # ranks with equal numbers of samples may have different numbers of packed rows
        coord = coord if packed_in(self._inputs) else self.like(coord)
        key = tuple(coord[axis] for axis in self.plan.mesh.axes)
        if key not in self._said:
            self._said[key] = self._said_at(coord)
        return {**self._said[key], "core": check_traffic(self.plan)} if checked else dict(self._said[key])

    def _said_at(self, coord: Coord) -> dict[str, tuple[Traffic, ...]]:
        plan = self.plan
        microbatches = self._microbatches(coord)
        calls = {id(microbatch): self._module_calls(microbatch) for microbatch in different(microbatches)}
        everywhere = tuple(calls[id(microbatch)] for microbatch in microbatches)
        on_stage = {id(model_calls): _on_stage(model_calls, plan, coord) for model_calls in different(everywhere)}
        module_calls = tuple(on_stage[id(model_calls)] for model_calls in everywhere)
        shards = microbatch_shards(plan, coord, self._num_samples, self._num_tokens)
        crossing = self._crossing(microbatches, shards, coord)
        sent = tuple(rehearsal.sent for rehearsal in crossing)
        batch = StepCalls(module_calls, shards, crossings(crossing), everywhere, microbatches, sent)
        return {s.name: tuple(t for t in s.traffic(plan, batch, coord) if t.num_bytes) for s in self.strategies}

    def _microbatches(self, coord: Coord) -> tuple[Any, ...]:
        """Returns the inputs of each microbatch of the rank at ``coord``, one object for all of one size."""
        shard = self.plan.batch_shard(coord)
        inputs = shard.cut_tokens(self._inputs, self._num_tokens)
        parts = microbatch_samples(shard.local_samples(self._num_samples), self.plan.layout.num_microbatches)
        if packed_in(inputs):
            return tuple(rows(inputs, part.start, part.stop) for part in parts)
        of_size = {len(part): part for part in parts}  # on the meta device, microbatches of one size are alike
        by_size = {size: rows(inputs, part.start, part.stop) for size, part in of_size.items()}
        return tuple(by_size[len(part)] for part in parts)

    def _parted_elements(self, coord: Coord) -> set[int]:
        """Returns the sizes in elements of the values that the rank at ``coord`` sends to other stages only in part."""
        shards = microbatch_shards(self.plan, coord, self._num_samples, self._num_tokens)
        tables = different(crossings(self._crossing(self._microbatches(coord), shards, coord)))
        values = (
            tensor for crossing in tables for tensors in crossing.values() for tensor in tensors if tensor.is_scattered
        )
        return {tensor.num_bytes // tensor.element_bytes for tensor in values}

    def _module_calls(self, microbatch: Any) -> ModuleCalls:
        shapes = tuple(leaf.shape for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))
        if shapes not in self._calls_by_shapes:
            calls = record_module_calls(self._whole, cloned(microbatch))
            self._calls_by_shapes[shapes] = count_recomputation(calls, self.plan.recomputed, self._trained)
        return self._calls_by_shapes[shapes]

    def _crossing(
        self, microbatches: Sequence[Any], shards: Sequence[BatchShard], coord: Coord
    ) -> tuple[MicrobatchRehearsal, ...]:
        if self.plan.stages is None:
            return (MicrobatchRehearsal({}),) * len(microbatches)
        axes = [axis for axis in self.plan.mesh.axes if axis in mesh_axes("operators")]
        # all stages see the same values, and model copies with as many samples see values of the same shapes
        counts = {id(shard): shard.counts(axes) for shard in different(shards)}
        key = (*(coord[axis] for axis in axes), *(counts[id(shard)] for shard in shards))
        if key not in self._crossings:
            model = narrow_model(without_storage(self.job.model), self.plan)  # a copy: the rehearsal changes it
            job = self.job._replace(model=model, loss=without_storage(self.job.loss))
            copies = [cloned(microbatch) for microbatch in microbatches]  # the model's code may write to its inputs
            self._crossings[key] = values_crossing(
                job, self.plan, self.strategies, copies, self._num_samples, coord, self._num_tokens
            )
        return self._crossings[key]


def narrow_model(model: nn.Module, plan: Plan) -> nn.Module:
    """Casts the model's parameters and buffers to the layout's compute dtypes (bf16, fp16), in place; returns it."""
    for parameter in model.parameters():
        parameter.data = cast_to_compute(parameter.data, plan)
    cast_buffers(model, plan)
    return model


def _on_stage(module_calls: ModuleCalls, plan: Plan, coord: Coord) -> ModuleCalls:
    """Returns the model's module calls that this rank's pipeline chunks make; a call made twice is listed twice."""
    if plan.stages is None or plan.schedule is None:
        return module_calls
    chunked, chunks = plan.stages.chunked, plan.schedule.chunks_of(coord["pp"])
    by_path: dict[str, tuple[ModuleCall, ...]] = {}
    for path, calls in module_calls.items():
        times = chunked.times(path, len(calls), chunks)
        by_path[path] = tuple(call for call, n in zip(calls, times, strict=True) for _ in range(n))
    return by_path


def microbatch_shards(plan: Plan, coord: Coord, num_global: int, num_tokens: int = 0) -> tuple[BatchShard, ...]:
    """Returns how many samples and tokens of each microbatch the rank at ``coord`` and the others get.

    Microbatches with equal numbers of samples on every rank share one entry, that of the first of them. ``num_global``
    is the number of samples of the global batch, and ``num_tokens`` the number of tokens of each sample, or 0 if the
    layout does not cut sequences.
    """
    mesh, number_of_all = plan.mesh, plan.layout.num_microbatches
    # the first (samples % microbatches) microbatches of a rank have one sample more than its others
    firsts = sorted({0, *(samples % number_of_all for samples in held_sizes(mesh, plan.row_axes, num_global))})
    shards: list[BatchShard] = []
    for first, after in pairwise((*firsts, number_of_all)):
        shard = plan.batch_shard(coord)
        shard.set_microbatch(num_global, first, number_of_all)
        shard.set_num_tokens(num_tokens)
        shards += [shard] * (after - first)
    return tuple(shards)


def numbers_per_sample(targets: Any, num_tokens: int = 0) -> int:
    """Returns the number of targets in one sample: the elements of the first tensor in ``targets``, per index of dim 0.

    Without a tensor it is 1. ``num_tokens``, if not 0, replaces the size of dim 1: where sequences are cut, a rank
    holds only a part of that dim.

    >>> numbers_per_sample(torch.zeros(0, 5, 2)), numbers_per_sample(torch.zeros(1, 3, 2), num_tokens=5)
    (10, 10)
    """
    tokens = [num_tokens] if num_tokens else []
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor):
            return prod([*tokens, *leaf.shape[1 + len(tokens) :]])
    return 1


def on_device(tree: Any, device: torch.device, copies: CopyStream | None = None) -> Any:
    """Returns a batch with all its tensors on ``device``; copies from the host to an accelerator run asynchronously.

    The copies run on the current stream. With ``copies`` they run on its stream, and the tensors may be used only after
    a call of the function that :meth:`CopyStream.arrival` returns.
    """

    def moved(tensor: Tensor) -> Tensor:
        if copies is not None:
            return copies.moved(tensor, device)
        beside = tensor.device.type == "cpu" and device.type not in ("cpu", "meta")
        return tensor.pin_memory().to(device, non_blocking=True) if beside else tensor.to(device)

    return tree_map_only(Tensor, moved, tree)
