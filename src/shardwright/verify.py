"""``verify``: any layout against one device: the loss, every gradient, parameters and buffers after some steps.

The reference is an untouched copy of the plain model under plain torch, in one process, the whole batch at once; where
microbatches have statistics of their own, one after the other, gradients added up. Only its dropout is ours too,
because masks that differ would hide everything else.

A gradient's error is its largest difference over its largest entry, but never over less than a thousandth of the
model's largest entry: a gradient that is truly zero (the bias of an attention's keys) is nothing but rounding.

AdamW as it comes makes too much of such a gradient: it divides each by its own size plus an ``eps`` of 1e-8, so that
1e-17 of rounding becomes 1e-12 in the parameter, and 1e-10 of a bias that starts from zero. Here both sides step with
an ``eps`` of a thousandth of the model's largest gradient entry, the same floor. Then a difference of rounding stays
one, no entry is left out, and a wrong factor that AdamW would have divided out again shows.

A buffer of numbers that the steps have changed is compared as a parameter is; any other has to be the same bit for bit.
A layout that computes in bf16 or fp16 is compared with the same reference, which computes in the dtype asked for: the
loss and the gradients of one step, within roundings of that precision.
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
from shardwright.analysis.module_calls import call_model
from shardwright.comm.launch import Ranks, launch
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.mesh import Coord, Mesh
from shardwright.models.losses import CrossEntropy, mean_of, sum_and_count
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.checks import check_loss, check_model, check_trains
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.planning import job_for, make_plan, num_rows, structural_copy
from shardwright.parallelize.run import Run
from shardwright.plan.batch_shard import microbatch_samples
from shardwright.plan.plan import Plan, compute_dtype
from shardwright.rng import RngTracker, key_dropout
from shardwright.runtime.executor import Microbatch
from shardwright.sharding.box import cut
from shardwright.sharding.tensor_layout import TensorLayout

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest error that counts as equal."""

ROUNDINGS = 8
"""With bf16 or fp16, the largest error that counts as equal, in roundings to that precision."""

NARROW_FLOOR = 0.1
"""There, the share of the model's largest entry below which an error counts as one of an entry of that size."""

LEARNING_RATE = 1e-3

FLOOR = 1e-3
"""Below this share of the model's largest entry an error counts as one of an entry of that size."""

Batch = tuple[Any, Any]
Named = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What ``verify`` found; ``first_difference`` is the first parameter in forward order beyond the tolerance.

    ``max_relative_error`` is the largest of the gradients', the parameters' and the buffers', and ``worst_parameter``
    has it.
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
        """The verdict as JSON takes it."""
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
    """Trains one step per batch under ``layout`` and on one device, and compares.

    ``model`` may be on the meta device. ``batches`` are global (inputs, targets), and are left alone. Complex numbers
    are of twice the ``dtype``. Gradients are compared after the first step; parameters and buffers after the last in
    float64 only, since in float32 AdamW makes too much of the rounding of a gradient near zero. ``alter`` changes each
    rank's run before it starts: to see a check fail.
    ``launcher(work, *args)`` runs ``work(world, *args)`` on ranks that are there already, instead of starting some.
    ``roles`` and ``seconds`` are those of ``parallelize``.

    >>> batch = (torch.randn(5, 6), torch.randint(3, (5,)))
    >>> print(verify(nn.Linear(6, 3), "dp2", [batch]))
    equal to one device: loss, 2 gradients and 1 steps on 2 ranks, largest error ...
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    _check_given(dtype, batches)
    loss = CrossEntropy() if loss is None else loss
    check_model(model)
    check_loss(loss)
    plain = structural_copy(model, partial(_cast, dtype))
    batches = [tree_map_only(Tensor, partial(_cast, dtype), batch) for batch in batches]
    job = job_for(plain, loss, layout, batches[0][0], tokens_of(batches[0][0], layout), dict(roles))
    job = job._replace(seconds=dict(seconds))
    plan, _ = make_plan(job, layout, strategies)  # a layout that cannot be is refused here
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


def _check_given(dtype: torch.dtype, batches: Sequence[Batch]) -> None:
    if dtype not in TOLERANCE:
        raise PlanError("verify compares in float64 or float32", given=dtype, allowed="float64, float32", fix="float64")
    if not batches:
        raise PlanError("there is nothing to verify on", given="no batches", allowed="one or more", fix="give one")


@dataclass
class _Outcome:
    losses: list[float]
    gradients: Named
    parameters: Named
    buffers: Named = field(default_factory=dict)
    eps: float = 0.0
    changed: frozenset[str] = frozenset()
    """Of the buffers, those that the steps gave other numbers."""


def _reference(plain: nn.Module, loss: nn.Module, batches: Sequence[Batch], seed: int, plan: Plan) -> _Outcome:
    """The same steps by plain torch, in one process."""
    model, rng = structural_copy(plain), RngTracker(seed)
    place_parameters(model, {}, {}, seed, torch.device("cpu"))
    on_several = len({p.device for p in plain.parameters()}) > 1
    for parameter in model.parameters():  # a plain model with values of its own keeps them
        parameter.data = parameter.data.to("cpu", copy=True) if on_several else parameter.data.clone()
    key_dropout(model, rng)
    before = _buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    outcome = _Outcome([], {}, {})
    for step, (inputs, targets) in enumerate(map(_own, batches)):
        rng.step, sums = step, []
        optimizer.zero_grad()
        for rng.samples, (some, theirs) in _at_once(plan, (inputs, targets)):
            with IgnoresDeviceMoves(torch.device("cpu")) if on_several else nullcontext():
                sums.append(sum_and_count(loss(call_model(model, some), theirs)))
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
    outcome.changed = frozenset(name for name in different if not _counts(before[name]))
    return outcome


def _at_once(plan: Plan, batch: Batch) -> Iterator[tuple[Sequence[int], Batch]]:
    """What one device takes together: the batch, or one microbatch of all ranks after the other; with its samples."""
    number, num_samples = plan.layout.num_microbatches, num_rows(batch)
    if not plan.layout.own_statistics:
        yield range(num_samples), batch
        return
    shares = (plan.batch_shard(at).local_samples(num_samples) for at in plan.mesh.coords(plan.row_axes))
    for together in zip(*(microbatch_samples(share, number) for share in shares), strict=True):
        samples = sorted(chain.from_iterable(together))
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
    for step, batch in enumerate(run.shard(map(_own, batches))):
        outcome.losses.append(_step(run, batch))
        if step == 0:
            outcome.gradients = _gradients(run.parameters)
        optimizer.step()
    outcome.parameters = {name: p.detach().cpu() for name, p in run.parameters.items()}
    outcome.buffers = _buffers(run.model)
    return outcome


def _step(run: Run, batch: Microbatch) -> float:
    """The loss of one step; in fp16, of the first that is not left out."""
    skipped = run.num_skipped
    loss = run.step(batch).item()
    while run.num_skipped > skipped:
        skipped, run.num_steps = run.num_skipped, run.num_steps - 1
        loss = run.step(batch).item()
    return loss


def _gradients(named: Mapping[str, nn.Parameter]) -> Named:
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().to("cpu", copy=True)
        for name, p in named.items()
        if p.requires_grad
    }


def _buffers(model: nn.Module) -> Named:
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers() if not buffer.is_meta}


def _counts(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _own(batch: Batch) -> Batch:
    """A copy, which the model may write into."""
    copied: Batch = tree_map_only(Tensor, torch.clone, batch)
    return copied


def _by_rank(found: Sequence[_Outcome], num_ranks: int) -> dict[int, _Outcome]:
    """Each rank's outcome; under torchrun there is one of them in each process, its own."""
    if len(found) == num_ranks:
        return dict(enumerate(found))
    return {int(os.environ["RANK"]): found[0]}


def _largest(named: Named) -> float:
    return max((float(tensor.abs().max()) for tensor in named.values() if tensor.numel()), default=0.0)


def _buffer_errors(plan: Plan, expected: _Outcome, found: Mapping[int, Named]) -> dict[str, float]:
    """The error of each buffer: of those that the steps left alone, and of counts, 0 or infinite."""
    lies = {name: plan.buffers.get(name, TensorLayout.whole(tuple(b.shape))) for name, b in expected.buffers.items()}
    numbers = {name: buffer for name, buffer in expected.buffers.items() if name in expected.changed}
    errors = _errors(lies, plan.mesh, numbers, found)
    for name, whole in expected.buffers.items():
        if name in numbers:
            continue
        there = lies[name]
        parts = ((plan.mesh.coord(rank), local.get(name)) for rank, local in found.items())
        same = all(
            b is not None and torch.equal(cut(whole, there.pieces(at), there.local_shape(at)), b)
            for at, b in parts
            if there.pieces(at)  # or else another stage has it
        )
        errors[name] = 0.0 if same else float("inf")
    return errors


def _errors(
    lies: Mapping[str, TensorLayout], mesh: Mesh, expected: Named, found: Mapping[int, Named], least: float = FLOOR
) -> dict[str, float]:
    """The error of each tensor, over all ranks, in the model's order."""
    floor = least * _largest(expected)
    errors = {}
    for name, whole in expected.items():
        scale = max(_largest({name: whole}), floor) or 1.0
        worst = 0.0
        for rank, local in found.items():
            coord: Coord = mesh.coord(rank)
            part = cut(whole, lies[name].pieces(coord), lies[name].local_shape(coord))
            mine = local.get(name)
            if not part.numel() and (mine is None or not lies[name].pieces(coord)):
                continue  # another stage has it
            if mine is None or mine.shape != part.shape:
                worst = float("inf")
            elif part.numel():
                difference = (mine - part).abs().max()
                worst = max(worst, float(difference.nan_to_num(nan=float("inf"))) / scale)
        errors[name] = worst
    return errors


def _compare(plan: Plan, expected: _Outcome, found: Sequence[_Outcome], dtype: torch.dtype, steps: int) -> Verdict:
    narrow = compute_dtype(dtype, plan.layout)
    tolerance = TOLERANCE[dtype] if narrow == dtype else ROUNDINGS * torch.finfo(narrow).eps
    mesh, rest = plan.mesh, plan.state
    by_rank = _by_rank(found, mesh.size)
    at_rest = {name: rest[name].gradient for name in rest}
    found_gradients = {rank: each.gradients for rank, each in by_rank.items()}
    least = FLOOR if narrow == dtype else NARROW_FLOOR
    gradients = _errors(at_rest, mesh, expected.gradients, found_gradients, least)
    exact = narrow == torch.float64
    at_rest = {name: rest[name].parameter for name in rest}
    after = {rank: each.parameters for rank, each in by_rank.items()}
    parameters = _errors(at_rest, mesh, expected.parameters, after) if exact else {}
    num_losses = len(expected.losses) if exact else 1
    loss_error = max(
        abs(mine - theirs) / max(abs(theirs), 1e-30)
        for each in by_rank.values()
        for mine, theirs in list(zip(each.losses, expected.losses, strict=True))[:num_losses]
    )
    buffers = _buffer_errors(plan, expected, {rank: each.buffers for rank, each in by_rank.items()}) if exact else {}
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


__all__ = ["TOLERANCE", "Verdict", "verify"]
