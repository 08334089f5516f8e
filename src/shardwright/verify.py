"""``verify`` compares a layout with one device: the loss, every gradient, parameters and buffers after some steps.

The reference is a copy of the plain model trained by plain torch in one process, on the whole batch at once. If
microbatches have batch statistics of their own, it takes them one after the other and accumulates gradients. Only
dropout is the library's, since different masks would hide every other difference.

The error of a gradient is its largest difference divided by its largest entry, but never by less than FLOOR times the
model's largest entry: a gradient that is zero in exact arithmetic (an attention's key bias) holds only rounding.

AdamW amplifies such rounding: it divides each entry by its own size plus an ``eps`` of 1e-8. So both sides step with an
``eps`` of FLOOR times the model's largest gradient entry. Rounding then stays rounding, no entry is exempt, and a wrong
factor that AdamW's division would cancel is visible.

A floating-point buffer that the steps change is compared like a parameter; any other must be equal bit for bit. A
layout in bf16 or fp16 is compared with the same reference: the loss and gradients of one step, within a few roundings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.device_moves import IgnoresDeviceMoves
from shardwright.analysis.draws import find_draws
from shardwright.analysis.module_calls import call_model
from shardwright.comm.launch import Ranks, launch
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.mesh import Mesh
from shardwright.models.losses import CrossEntropy, mean_of, sum_and_count
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.checks import check_loss, check_model, check_trains
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.planning import job_for, make_plan, num_rows, structural_copy
from shardwright.parallelize.run import Run
from shardwright.plan.batch_shard import microbatch_samples
from shardwright.plan.plan import Plan, compute_dtype
from shardwright.rng import RngTracker
from shardwright.runtime.executor import Microbatch
from shardwright.runtime.keyed_draws import key_draws
from shardwright.sharding.box import cut
from shardwright.sharding.tensor_layout import TensorLayout

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest error that counts as equal."""

ROUNDINGS = 8
"""The largest error that counts as equal in bf16 and fp16, in units of that dtype's rounding."""

FLOOR, NARROW_FLOOR = 1e-3, 0.1
"""The least entry that an error is divided by, as a share of the model's largest; the second in bf16 and fp16."""

LEARNING_RATE = 1e-3

Batch = tuple[Any, Any]
Named = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of ``verify``: whether a layout equals one device within ``tolerance``, and the largest errors.

    ``first_difference`` names the first parameter in forward order whose error is beyond the tolerance.
    ``max_relative_error`` is the largest error of any gradient, parameter or buffer; ``worst_parameter`` names it.
    """

    equal: bool
    max_relative_error: float
    worst_parameter: str
    first_difference: str
    first_error: float
    loss_error: float
    gradients_error: float
    parameters_error: float
    buffers_error: float
    tolerance: float
    parameters: int
    world_size: int
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict as a dict for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.equal:
            return (
                f"equal to one device: loss, {self.parameters} gradients and {self.steps} steps on "
                f"{self.world_size} ranks, largest error {self.max_relative_error:.1e} "
                f"({self.worst_parameter}), allowed {self.tolerance:.0e}"
            )
        return (
            f"NOT equal to one device: first at {self.first_difference or 'the loss'} by {self.first_error:.1e}, worst "
            f"at {self.worst_parameter} by {self.max_relative_error:.1e}, allowed {self.tolerance:.0e}; "
            f"loss off by {self.loss_error:.1e}, gradients by {self.gradients_error:.1e}, "
            f"parameters after {self.steps} steps by {self.parameters_error:.1e}, buffers by {self.buffers_error:.1e}"
        )


def verify(
    model: nn.Module,
    layout: Layout | str,
    batches: Sequence[Batch],
    *,
    loss: nn.Module | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    ranks: Ranks = "threads",
    strategies: Any = None,
    alter: Callable[[Any], None] | None = None,
    launcher: Callable[..., Sequence[Any]] | None = None,
    roles: Mapping[str, str] = MappingProxyType({}),
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> Verdict:
    """Trains one step per batch under ``layout`` and on one device, and returns how far the two differ.

    ``model`` may be on the meta device. ``batches`` are global (inputs, targets) and are not written to. Complex
    tensors take the complex dtype of ``dtype``. Gradients are compared after the first step. Parameters and buffers are
    compared after the last, in float64 only: in float32 AdamW amplifies the rounding of gradients near zero.
    ``alter(run)`` changes each rank's run before the first step, to test that a fault is found.
    ``launcher(work, *args)`` runs ``work(world, *args)`` on existing ranks; without it, ``verify`` starts them.
    ``roles`` and ``seconds`` are those of ``parallelize``.

    >>> batch = (torch.randn(5, 6), torch.randint(3, (5,)))
    >>> print(verify(nn.Linear(6, 3), "dp2", [batch]))
    equal to one device: loss, 2 gradients and 1 steps on 2 ranks, largest error ...
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if dtype not in TOLERANCE:
        raise PlanError("verify compares in float64 or float32", given=dtype, allowed="float64, float32", fix="float64")
    if not batches:
        raise PlanError("there is nothing to verify on", given="no batches", allowed="one or more", fix="give one")
    loss = CrossEntropy() if loss is None else loss
    check_model(model)
    check_loss(loss)
    plain = structural_copy(model, partial(_cast, dtype))
    batches = [tree_map_only(Tensor, partial(_cast, dtype), batch) for batch in batches]
    job = job_for(plain, loss, layout, batches[0][0], tokens_of(batches[0][0], layout), dict(roles))
    job = job._replace(seconds=dict(seconds))
    plan, _ = make_plan(job, layout, strategies)  # raises LayoutError before any rank starts
    check_trains(plan)
    expected = _reference(plain, loss, batches, seed, plan)
    work = (plain, layout, batches, loss, seed, expected.eps, job.roles, job.seconds)
    if launcher is not None:
        found = launcher(_rank, *work, strategies, alter)
    elif ranks == "processes":
        assert alter is None, "threads only"
        assert strategies is None, "threads only"
        found = launch(_rank, layout, *work, ranks="processes", debug=True)
    else:
        found = launch(_rank, layout, *work, strategies, alter, ranks="threads")
    return _compare(plan, expected, found, dtype, len(batches))


@dataclass
class _Outcome:
    losses: list[float]
    gradients: Named
    parameters: Named
    buffers: Named = field(default_factory=dict)
    eps: float = 0.0
    changed: frozenset[str] = frozenset()
    """The names of the floating-point buffers that the steps changed."""


def _reference(plain: nn.Module, loss: nn.Module, batches: Sequence[Batch], seed: int, plan: Plan) -> _Outcome:
    """Trains the plain model with plain torch in this process."""
    model, rng = structural_copy(plain), RngTracker(seed)
    place_parameters(model, {}, {}, seed, torch.device("cpu"))
    on_several = len({p.device for p in plain.parameters()}) > 1
    for parameter in model.parameters():  # the copy shares storage with the caller's model, which must not be trained
        parameter.data = parameter.data.to("cpu", copy=True) if on_several else parameter.data.clone()
    key_draws(model, rng, find_draws(model, batches[0][0]))
    before = _buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    outcome = _Outcome([], {}, {})
    for step, batch in enumerate(map(_clone, batches)):
        rng.step, sums = step, []
        optimizer.zero_grad()
        for rng.samples, (inputs, targets) in _parts(plan, batch):
            with IgnoresDeviceMoves(torch.device("cpu")) if on_several else nullcontext():
                sums.append(sum_and_count(loss(call_model(model, inputs), targets)))
        loss_sum = torch.stack([each for each, _ in sums]).sum()
        mean, _ = mean_of(loss_sum, sum(float(count) for _, count in sums))
        mean.backward()
        outcome.losses.append(mean.item())
        if step == 0:
            outcome.gradients = _gradients(dict(model.named_parameters()))
            outcome.eps = FLOOR * _largest(outcome.gradients) or 1e-8
            optimizer.param_groups[0]["eps"] = outcome.eps
        optimizer.step()
    outcome.parameters = {name: p.detach() for name, p in model.named_parameters()}
    outcome.buffers = _buffers(model)
    different = (name for name, buffer in outcome.buffers.items() if not torch.equal(buffer, before[name]))
    outcome.changed = frozenset(
        name for name in different if before[name].is_floating_point() or before[name].is_complex()
    )
    return outcome


def _parts(plan: Plan, batch: Batch) -> Iterator[tuple[Sequence[int], Batch]]:
    """The parts that the reference runs one after the other, each with the indices of its samples.

    One part, the whole batch; with batch statistics per microbatch, each microbatch of all ranks together.
    """
    num_microbatches, num_samples = plan.layout.num_microbatches, num_rows(batch)
    if not plan.layout.own_statistics:
        yield range(num_samples), batch
        return
    shards = (plan.batch_shard(at).local_samples(num_samples) for at in plan.mesh.coords(plan.row_axes))
    for by_shard in zip(*(microbatch_samples(shard, num_microbatches) for shard in shards), strict=True):
        samples = sorted(chain.from_iterable(by_shard))
        yield samples, tree_map_only(Tensor, itemgetter(samples), batch)


def _rank(
    world: World, plain: nn.Module, layout: Layout, batches: Sequence[Batch], loss: nn.Module, seed: int, eps: float,
    roles: Mapping[str, str], seconds: Mapping[str, float], strategies: Any = None,
    alter: Callable[[Any], None] | None = None,
) -> _Outcome:  # fmt: skip
    num_tokens = tokens_of(batches[0][0], layout)
    run = parallelize(
        plain, layout, world, loss=loss, seed=seed, num_tokens=num_tokens, strategies=strategies, roles=roles,
        example=batches[0][0], seconds=seconds,
    )  # fmt: skip
    if alter is not None:
        alter(run)
    optimizer = run.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, eps=eps)
    outcome = _Outcome([], {}, {})
    for step, batch in enumerate(run.shard(map(_clone, batches))):
        outcome.losses.append(_step(run, batch))
        if step == 0:
            outcome.gradients = _gradients(run.parameters)
        optimizer.step()
    outcome.parameters = {name: p.detach().cpu() for name, p in run.parameters.items()}
    outcome.buffers = _buffers(run.model)
    return outcome


def _step(run: Run, batch: Microbatch) -> float:
    """The loss of one step. In fp16 a step that overflows is skipped and repeated with the smaller loss scale."""
    while True:
        skipped = run.num_skipped
        loss = run.step(batch).item()
        if run.num_skipped == skipped:
            return loss
        run.num_steps -= 1  # the repeated step must draw the same random numbers


def _gradients(named: Mapping[str, nn.Parameter]) -> Named:
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().to("cpu", copy=True)
        for name, p in named.items()
        if p.requires_grad
    }


def _buffers(model: nn.Module) -> Named:
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers() if not buffer.is_meta}


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _clone(batch: Batch) -> Batch:
    """A copy of the batch, since a model may write into its inputs."""
    copied: Batch = tree_map_only(Tensor, torch.clone, batch)
    return copied


def _largest(named: Named) -> float:
    return max((float(tensor.abs().max()) for tensor in named.values() if tensor.numel()), default=0.0)


def _buffer_errors(plan: Plan, expected: _Outcome, found: Mapping[int, Named]) -> dict[str, float]:
    """The error of each buffer; 0 or infinite for integers and for buffers that the steps do not change."""
    layouts = {name: plan.buffers.get(name, TensorLayout.whole(tuple(b.shape))) for name, b in expected.buffers.items()}
    changed = {name: buffer for name, buffer in expected.buffers.items() if name in expected.changed}
    errors = _errors(layouts, plan.mesh, changed, found)
    for name, whole in expected.buffers.items():
        if name in changed:
            continue
        layout = layouts[name]
        by_coord = ((plan.mesh.coord(rank), local.get(name)) for rank, local in found.items())
        same = all(
            b is not None and torch.equal(cut(whole, layout.pieces(at), layout.local_shape(at)), b)
            for at, b in by_coord
            if layout.pieces(at)  # no pieces: the buffer belongs to another pipeline stage
        )
        errors[name] = 0.0 if same else float("inf")
    return errors


def _errors(
    layouts: Mapping[str, TensorLayout], mesh: Mesh, expected: Named, found: Mapping[int, Named], floor: float = FLOOR
) -> dict[str, float]:
    """The largest error of each tensor over all ranks, in the model's order."""
    least = floor * _largest(expected)
    errors = {}
    for name, whole in expected.items():
        scale = max(_largest({name: whole}), least) or 1.0
        worst = 0.0
        for rank, local in found.items():
            coord, layout, actual = mesh.coord(rank), layouts[name], local.get(name)
            part = cut(whole, layout.pieces(coord), layout.local_shape(coord))
            if not part.numel() and (actual is None or not layout.pieces(coord)):
                continue  # this tensor belongs to another pipeline stage
            if actual is None or actual.shape != part.shape:
                worst = float("inf")
            elif part.numel():
                difference = (actual - part).abs().max()
                worst = max(worst, float(difference.nan_to_num(nan=float("inf"))) / scale)
        errors[name] = worst
    return errors


def _compare(plan: Plan, expected: _Outcome, found: Sequence[_Outcome], dtype: torch.dtype, steps: int) -> Verdict:
    narrow = compute_dtype(dtype, plan.layout)
    tolerance = TOLERANCE[dtype] if narrow == dtype else ROUNDINGS * torch.finfo(narrow).eps
    mesh, exact = plan.mesh, narrow == torch.float64
    # a launcher that uses torchrun's ranks returns, in each process, that process's outcome only
    by_rank = dict(enumerate(found)) if len(found) == mesh.size else {int(os.environ["RANK"]): found[0]}
    layouts = {name: state.gradient for name, state in plan.state.items()}
    local = {rank: each.gradients for rank, each in by_rank.items()}
    gradients = _errors(layouts, mesh, expected.gradients, local, FLOOR if narrow == dtype else NARROW_FLOOR)
    parameters, buffers = dict[str, float](), dict[str, float]()
    if exact:
        layouts = {name: state.parameter for name, state in plan.state.items()}
        local = {rank: each.parameters for rank, each in by_rank.items()}
        parameters = _errors(layouts, mesh, expected.parameters, local)
        buffers = _buffer_errors(plan, expected, {rank: each.buffers for rank, each in by_rank.items()})
    num_losses = len(expected.losses) if exact else 1
    loss_error = max(
        abs(actual - reference) / max(abs(reference), 1e-30)
        for each in by_rank.values()
        for actual, reference in list(zip(each.losses, expected.losses, strict=True))[:num_losses]
    )
    errors = {name: max(gradients.get(name, 0.0), parameters.get(name, 0.0)) for name in expected.parameters} | buffers
    worst = max(errors, key=lambda name: errors[name])
    beyond = [name for name, error in gradients.items() if not error <= tolerance]
    beyond += [name for name, error in (parameters | buffers).items() if not error <= tolerance and name not in beyond]
    return Verdict(
        equal=not beyond and loss_error <= tolerance,
        max_relative_error=errors[worst],
        worst_parameter=worst,
        first_difference=beyond[0] if beyond else "",
        first_error=errors[beyond[0]] if beyond else loss_error,
        loss_error=loss_error,
        gradients_error=max(gradients.values()),
        parameters_error=max(parameters.values(), default=0.0),
        buffers_error=max(buffers.values(), default=0.0),
        tolerance=tolerance,
        parameters=len(gradients),
        world_size=mesh.size,
        steps=steps,
    )
