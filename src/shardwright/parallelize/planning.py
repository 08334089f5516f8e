"""From a plain model and a layout to a plan: pure, on the meta device, equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.batch_norms import ignore_batch_statistics
from shardwright.analysis.copying import copied
from shardwright.analysis.module_calls import ModuleCall, ModuleCalls, record_module_calls
from shardwright.axes import mesh_axes
from shardwright.errors import GridError, LayoutError
from shardwright.forward_stack import Rung
from shardwright.layout import Layout
from shardwright.mesh import Coord
from shardwright.parallelize.advice import advised
from shardwright.parallelize.auto import num_shares, samples_of, settle
from shardwright.parallelize.checks import check_microbatches, check_renormed
from shardwright.parallelize.rehearsal import crossings, values_crossing
from shardwright.plan.batch_shard import BatchShard, microbatch_samples, num_tokens_of
from shardwright.plan.layer_overrides import overrides_of
from shardwright.plan.plan import NUM_TOKENS, Job, Plan
from shardwright.plan.recompute import activation_offload_target, called_modules, count_recomputation, recomputed_blocks
from shardwright.plan.traffic import BoundaryTensor, StepCalls, Traffic
from shardwright.runtime.empty_batches import support_empty_batches
from shardwright.runtime.mixed_precision import cast_buffers, cast_to_compute
from shardwright.strategies import choose
from shardwright.strategies.pipeline.cut import stages_by_device
from shardwright.strategies.tensor_parallel.place import sent
from shardwright.strategy import Strategy


def without_storage(model: nn.Module) -> nn.Module:
    """A copy of the model's structure on the meta device: modules are new, no values are copied.

    >>> without_storage(nn.Linear(2, 2)).weight.device.type
    'meta'
    """
    return _copied(model, lambda tensor: tensor.to("meta"))


def structural_copy(model: nn.Module, seen_as: Callable[[Tensor], Tensor] = Tensor.detach) -> nn.Module:
    """A copy of the model's structure that shares its values: changing its modules leaves the original alone.

    ``seen_as`` may give other values in place of a parameter's or buffer's own; what is shared stays shared.

    >>> model = nn.Linear(2, 2)
    >>> other = structural_copy(model)
    >>> other is model, other.weight.data_ptr() == model.weight.data_ptr()
    (False, True)
    """
    return _copied(model, lambda tensor: seen_as(tensor).detach())


def _copied(model: nn.Module, change: Any) -> nn.Module:
    memo: dict[int, Any] = {id(p): nn.Parameter(change(p), requires_grad=p.requires_grad) for p in model.parameters()}
    memo.update({id(b): change(b) for b in model.buffers()})
    return copied(model, memo)


def make_plan(
    job: Job, layout: Layout, strategies: Sequence[Strategy] | None = None
) -> tuple[Plan, tuple[Strategy, ...]]:
    """Every strategy of the layout refines the plan in turn.

    Raises: LayoutError, PlanError: what cannot be laid out; no message has been sent by then.

    >>> plan, strategies = make_plan(Job(nn.Linear(2, 2), nn.Identity()), Layout.parse("dp2"))
    >>> plan.inputs, plan.mesh.size
    ({'dp': 0}, 2)
    """
    layout = settle(layout, partial(_sent, job))
    strategies = choose(layout) if strategies is None else tuple(strategies)
    whole = job._replace(model=without_storage(job.model))
    check_microbatches(whole.model, layout)
    overrides_of(whole)  # names that the model does not have are refused under any layout
    again = recomputed_blocks(whole.model, layout)
    plan = Plan.of(whole, layout)
    for strategy in strategies:
        try:
            plan = strategy.place(whole, plan)
        except GridError as error:
            raise advised(error, whole, layout) from None
    check_renormed(whole.model, plan)
    if plan.stages is not None:
        again = called_modules(whole.model, again, plan.stages.opened)
    stores = activation_offload_target(layout) is not None
    for path in again:
        plan = plan.wraps(path, Rung.OFFLOAD if stores else Rung.RECOMPUTE, "core")
    return replace(plan, offloaded_activations=again if stores else (), recomputed=() if stores else again), strategies


def _sent(job: Job, layout: Layout) -> float:
    """The bytes that the first rank, which holds most, sends in a step if the model is not cut into stages.

    Without an example nothing is known of a batch but its tokens: then it is the elements that linear layers send.
    """
    layout = replace(layout, factors=tuple(factor for factor in layout.factors if factor.axis != "pp"))
    plan, strategies = make_plan(job, layout)  # stages send little beside layers, and are cut but once
    if job.example is None:
        return sent(plan)
    inputs = tree_map_only(Tensor, lambda t: t.new_empty((len(t) * num_shares(layout), *t.shape[1:])), job.example)
    said = StepTraffic(job, plan, strategies, inputs).at(dict.fromkeys(plan.mesh.axes, 0))
    return sum(each.sent_bytes for traffic in said.values() for each in traffic)


def example_of(inputs: Any, layout: Layout) -> Any:
    """One microbatch of one model copy, on the meta device, of a global batch's inputs; None stays None.

    >>> example_of(torch.zeros(8, 3), Layout.parse("dp2 mb2")).shape
    torch.Size([2, 3])
    """
    if inputs is None:
        return None
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
    return rows(on_meta, 0, -(-num_rows(inputs) // num_shares(layout)))


def job_for(
    model: nn.Module,
    loss: nn.Module,
    layout: Layout,
    inputs: Any = None,
    num_tokens: int = NUM_TOKENS,
    roles: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """What is to be laid out, for global batches like ``inputs``, of which shapes alone count.

    >>> job_for(nn.Linear(3, 3), nn.Identity(), Layout.parse("dp2"), torch.zeros(8, 3)).example.shape
    torch.Size([4, 3])
    """
    example, num_samples = example_of(inputs, layout), samples_of(inputs, layout)
    stages = stages_by_device(model) if layout.factor("pp") is not None else ()
    return Job(model, loss, num_tokens, roles=roles, example=example, num_samples=num_samples, stages=stages)


def rows(tree: Any, start: int, stop: int) -> Any:
    """Returns these samples of every tensor of a batch, as views."""
    if isinstance(tree, Tensor):  # a walk through a tree costs ten times as much
        return tree[start:stop]
    return tree_map_only(Tensor, lambda tensor: tensor[start:stop], tree)


def num_rows(tree: Any) -> int:
    """How many samples a batch has.

    >>> num_rows((torch.zeros(3, 2), {"mask": torch.zeros(3)}))
    3
    """
    sizes: set[int] = set()
    tree_map_only(Tensor, lambda tensor: sizes.add(tensor.shape[0]), tree)
    if len(sizes) != 1:
        raise LayoutError(
            "the tensors of a batch have different numbers of samples",
            given=sorted(sizes),
            allowed="one number in dim 0 of all",
            fix="give every tensor of the batch the samples in dim 0",
        )
    return sizes.pop()


class StepTraffic:
    """What each strategy says that one step on a global batch sends, from any rank.

    Ranks whose microbatches have the same shapes see the same calls of the model, which are observed once.
    """

    def __init__(self, job: Job, plan: Plan, strategies: Sequence[Strategy], inputs: Any) -> None:
        self.job, self.plan, self.strategies = job, plan, tuple(strategies)
        self._whole = narrow_model(without_storage(job.model), plan)
        ignore_batch_statistics(self._whole)
        support_empty_batches(self._whole)
        self._inputs = tree_map_only(Tensor, lambda tensor: cast_to_compute(tensor.to("meta"), plan), inputs)
        self._num_samples, self._num_tokens = num_rows(inputs), num_tokens_of(inputs) if plan.token_axes else 0
        self._trained = {use.module for use in plan.uses if use.parameter not in plan.frozen}
        self._seen: dict[tuple[torch.Size, ...], ModuleCalls] = {}
        self._crossed: dict[tuple[object, ...], tuple[Mapping[str, tuple[BoundaryTensor, ...]], ...]] = {}

    def at(self, coord: Coord) -> dict[str, tuple[Traffic, ...]]:
        """By strategy, the messages of the rank at ``coord``."""
        plan = self.plan
        shard = plan.batch_shard(coord)
        inputs = shard.cut_tokens(self._inputs, self._num_tokens)
        shares = microbatch_samples(shard.local_samples(self._num_samples), plan.layout.num_microbatches)
        mine = [rows(inputs, share.start, share.stop) for share in shares]
        everywhere = tuple(map(self._visits, mine))
        module_calls = tuple(_on_stage(each, plan, coord) for each in everywhere)
        shards = microbatch_shards(plan, coord, self._num_samples, self._num_tokens)
        crossing = self._crossing(mine, shards, coord)
        batch = StepCalls(module_calls, next(self._whole.parameters()).element_size(), shards, crossing, everywhere)
        return {s.name: tuple(t for t in s.traffic(plan, batch, coord) if t.num_bytes) for s in self.strategies}

    def _visits(self, microbatch: Any) -> ModuleCalls:
        shapes = tuple(leaf.shape for leaf in tree_leaves(microbatch) if isinstance(leaf, Tensor))
        if shapes not in self._seen:
            self._seen[shapes] = count_recomputation(
                record_module_calls(self._whole, microbatch), self.plan.recomputed, self._trained
            )
        return self._seen[shapes]

    def _crossing(
        self, microbatches: Sequence[Any], shards: Sequence[BatchShard], coord: Coord
    ) -> tuple[Mapping[str, tuple[BoundaryTensor, ...]], ...]:
        if self.plan.stages is None:
            return tuple({} for _ in microbatches)
        axes = [axis for axis in self.plan.mesh.axes if axis in mesh_axes("operators")]
        # stages share the values, and copies of the model compute alike on as many samples
        key = (*(coord[axis] for axis in axes), *(each.counts(axes) for each in shards))
        if key not in self._crossed:
            apart = narrow_model(without_storage(self.job.model), self.plan)  # it will be changed
            job = self.job._replace(model=apart, loss=without_storage(self.job.loss))
            self._crossed[key] = crossings(
                values_crossing(
                    job, self.plan, self.strategies, microbatches, self._num_samples, coord, self._num_tokens
                )
            )
        return self._crossed[key]


def narrow_model(model: nn.Module, plan: Plan) -> nn.Module:
    """The model, its parameters and buffers in what the layout computes in."""
    for parameter in model.parameters():
        parameter.data = cast_to_compute(parameter.data, plan)
    cast_buffers(model, plan)
    return model


def _on_stage(module_calls: ModuleCalls, plan: Plan, coord: Coord) -> ModuleCalls:
    """The calls that this rank's chunks make, of all that the model makes; what several make is there several times."""
    if plan.stages is None or plan.schedule is None:
        return module_calls
    chunked, chunks = plan.stages.chunked, plan.schedule.chunks_of(coord["pp"])
    found: dict[str, tuple[ModuleCall, ...]] = {}
    for path, calls in module_calls.items():
        times = chunked.times(path, len(calls), chunks)
        found[path] = tuple(call for call, n in zip(calls, times, strict=True) for _ in range(n))
    return found


def microbatch_shards(plan: Plan, coord: Coord, num_global: int, num_tokens: int = 0) -> tuple[BatchShard, ...]:
    """Returns what the rank at ``coord`` has of each microbatch of a global batch of so many samples and tokens."""
    found = tuple(plan.batch_shard(coord) for _ in range(plan.layout.num_microbatches))
    for number, shard in enumerate(found):
        shard.set_microbatch(num_global, number, len(found))
        shard.set_num_tokens(num_tokens)
    return found


def numbers_per_sample(targets: Any, num_tokens: int = 0) -> int:
    """How many targets a sample has, what a loss counts where none is ignored; of so many tokens, where these are cut.

    >>> numbers_per_sample(torch.zeros(0, 5, 2)), numbers_per_sample({"class": torch.zeros(3)})
    (10, 1)
    >>> numbers_per_sample(torch.zeros(1, 3, 2), num_tokens=5)
    10
    """
    sizes: list[int] = []
    whole = [num_tokens] if num_tokens else []
    tree_map_only(Tensor, lambda tensor: sizes.append(prod([*whole, *tensor.shape[1 + len(whole) :]])), targets)
    return sizes[0] if sizes else 1


def on_device(tree: Any, device: torch.device) -> Any:
    """A batch on the rank's device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)
