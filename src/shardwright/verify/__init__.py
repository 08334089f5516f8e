"""``verify`` compares a layout with one device: the loss, every gradient, parameters and buffers after some steps.

The reference is a copy of the plain model, made before any strategy sees it and with values of its own, and trained by
plain torch in one process, on the whole batch at once. If microbatches have batch statistics of their own, the
reference takes the microbatches one after the other and accumulates gradients. Only the random numbers that the forward
draws are the library's, since different dropout masks would hide every other difference. If the caller's model is
changed, ``verify`` raises an error: see ``analysis/objects/left_untouched.py``.

The error of a gradient is its largest absolute difference divided by its largest absolute entry, but never by less than
1e-3 (``FLOOR``) times that of all gradients, or 0.1 (``NARROW_FLOOR``) times for a layout in bf16 or fp16: a gradient
that is zero in exact arithmetic (an attention's key bias) holds only rounding. A gradient on one side alone is a
difference, even one of zeros: with it an optimizer applies weight decay.

AdamW amplifies such rounding: it divides each entry by its own size plus an ``eps`` of 1e-8. So both sides step with an
``eps`` of 0.1 (``EPS``) times the largest absolute entry of all gradients. Rounding then stays rounding, no entry is
exempt, and a wrong factor that AdamW's division would cancel is visible.

On an accelerator, products of float32 round to float32 while ``verify`` runs: TF32 is off on every rank, and as before
afterwards. Kernels and collectives may add in another order at every run. That is rounding, within the tolerance, and
``verify`` does not ask for deterministic ones, because it is to prove what will run. ``train --deterministic`` does.

A floating-point buffer that the steps change is compared like a parameter; any other must be equal bit for bit. A
layout in bf16 or fp16 is compared with the same reference: the loss and gradients of one step, within a few roundings
(``ROUNDINGS``). A tensor that differs by more, as after BatchNorm and ReLU, is allowed three times the difference of
plain torch in that dtype on one device (in fp16 with a loss scale), but less than a half (``MAX_ERROR``).

A layout with ``compile`` first takes steps that count for nothing, so that all steps that are compared run compiled.
The reference is plain torch, uncompiled, and the tolerance is the same: a compiler may only order sums differently.

The tolerance (``TOLERANCE``) is 1e-10 in float64 and 1e-5 in float32, with one exception. If a tensor differs by more,
the reference is run again to measure by how much one device differs from itself (``reference.py`` says how): because
the model rounds to a narrower dtype inside, as norms that compute in float32 do, or because it magnifies roundings, as
a stack of BatchNorms over two values each does. Each tensor is then allowed three times (``DEVICE_ERROR_FACTOR``) its
own such difference, if that is more than the tolerance. If the difference itself is more than the tolerance, at least
one rounding of the narrow dtype is allowed. At most 1,000 (``MAX_ROUNDINGS``) roundings of the narrow dtype are
allowed, or of float32 if no operator rounds. The same holds for the loss; if that is a float32 number, its own
difference counts as at least one rounding. All other tensors keep the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.objects.copying import check_apart
from shardwright.analysis.objects.left_untouched import left_untouched
from shardwright.analysis.objects.marked_inputs import unmarked
from shardwright.analysis.objects.reached import unregistered
from shardwright.analysis.on_meta.module_calls import call_plainly
from shardwright.analysis.on_meta.operator_results import cloned
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks, check_can_start
from shardwright.comm.world import World
from shardwright.devices import exact_float32
from shardwright.errors import LayoutError, PlanError
from shardwright.formatting import first_line
from shardwright.layout import Layout
from shardwright.models.given_loss import Loss, loss_for
from shardwright.models.losses import sum_and_count
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.batches import Targets, pairs
from shardwright.parallelize.checks import check_loss, check_model, check_names
from shardwright.parallelize.loss_watch import note_reads
from shardwright.parallelize.planning import copied_loss, job_for, make_plan, shares_of, structural_copy
from shardwright.parallelize.run import Run
from shardwright.parallelize.step_checks import check_trains
from shardwright.plan.plan import compute_dtype
from shardwright.runtime.executor import Microbatch
from shardwright.verify.comparison import NARROW_FLOOR, TOLERANCE, compare_outcomes
from shardwright.verify.reference import (
    LEARNING_RATE,
    Batch,
    DeviceDifference,
    TrainingOutcome,
    copied_buffers,
    copied_gradients,
    first_not_finite,
    narrow_errors,
    own_errors,
    reference,
)
from shardwright.verify.verdict import Verdict

__all__ = ["Verdict", "verify"]

NUM_STEPS_TO_COMPILE = 2
"""The number of steps after which all blocks of a layout with ``compile`` run compiled."""


@exact_float32()
def verify(
    model: nn.Module,
    layout: Layout | str,
    batches: Sequence[Batch],
    *,
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    ranks: Ranks = "threads",
    strategies: Any = None,
    alter: Callable[[Any], None] | None = None,
    launcher: Callable[..., Sequence[Any]] | None = None,
    roles: Mapping[str, str] = MappingProxyType({}),
    seconds: Mapping[str, float] = MappingProxyType({}),
    targets: Targets = None,
) -> Verdict:
    """Trains under ``layout`` and on one device, a step per batch, and returns a verdict with the largest differences.

    ``model`` may be on the meta device; copies of it are trained in ``dtype``: by default float64, or float32 if plain
    torch runs the model only in float32, for example because its code writes ``x.float()``; the verdict says so.
    ``batches`` are global (inputs, targets) and are not written to. Complex tensors take the complex dtype of
    ``dtype``. The default loss is cross entropy. ``seed`` determines initial values that the model lacks, and dropout.
    Gradients are compared after the first step. Parameters and buffers are compared after the last, in float64 only: in
    float32 AdamW amplifies the rounding of gradients near zero. ``alter(run)`` changes each rank's run before the first
    step, to test that a fault is found. ``launcher(work, *args)`` runs ``work(world, *args)`` on existing ranks;
    without it, ``verify`` starts them. ``alter`` and ``strategies`` need ranks that are threads, or a launcher.
    ``roles``, ``seconds`` and ``strategies`` are those of ``parallelize``, and ``targets`` is that of ``Run.shard``:
    which part of a batch that is no pair the targets are.

    Raises: LayoutError, PlanError: the layout does not fit the model or this machine, there are no batches, ``dtype``
        is neither float64 nor float32, or a copy of the model has written to ``model``. RankFailedError: a rank failed.
        A difference is not raised: it is in the verdict.

    >>> batch = (torch.randn(5, 6), torch.randint(3, (5,)))
    >>> print(verify(nn.Linear(6, 3), "dp2", [batch]))
    equal to one device: loss, 2 gradients and 1 steps on 2 ranks, largest error ...
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if dtype not in (None, *TOLERANCE):
        raise PlanError("verify compares in float64 or float32", given=dtype, allowed="float64, float32", fix="float64")
    if not batches:
        raise PlanError("there is nothing to verify on", given="no batches", allowed="one or more", fix="give one")
    loss = loss_for(loss, model)
    if targets is None and isinstance(loss, ModelLoss):
        targets = loss.pair
    batches = list(pairs(batches, targets, model, "sw.verify(model, layout, batches"))
    if launcher is None:
        check_can_start(layout.num_ranks, ranks)
    check_model(model)
    check_names(model, layout)
    check_loss(loss)
    compared = partial(
        _compared, model, layout, batches, loss, seed, ranks, strategies, alter, launcher, dict(roles), dict(seconds)
    )
    if dtype is not None:
        return compared(dtype)
    try:
        verdict = compared(torch.float64)
    except Exception as failure:  # a model's own code may raise anything in a dtype that it does not run in
        if isinstance(failure, LayoutError | PlanError) and not _may_be_of_dtype(failure):
            raise  # the error is one of the layout or of the model's kind, in any dtype
        in_float32 = _error_in(torch.float32, model, loss, batches[0])
        why = _error_in(torch.float64, model, loss, batches[0]) if in_float32 is None else ""
        if in_float32 is not None:
            failure.add_note(f"In float32 plain torch has no result: {in_float32}")
        if not why:
            raise
    else:
        is_number = math.isfinite(verdict.loss_error) and not math.isnan(verdict.gradients_error)
        why = "" if is_number else _only_in_float32(model, loss, batches[0])
        if not why:
            return verdict
    return replace(compared(torch.float32), only_float32=why)


def _may_be_of_dtype(failure: LayoutError | PlanError) -> bool:
    """Returns whether an error may come of the dtype: torch's own, an assertion, or a parameter that code converts.

    So may the refusal of a layout be, where the forward cannot be recorded: its code may assert a dtype.
    """
    is_codes = isinstance(failure.__cause__, RuntimeError | AssertionError)
    return is_codes or "not be recorded" in str(failure) or " the parameter '" in failure.what


def _only_in_float32(model: nn.Module, loss: nn.Module, batch: Batch) -> str:
    """Returns why plain torch has no result of a step in float64, if it has one in float32; "" otherwise."""
    why = _error_in(torch.float64, model, loss, batch)
    return why if why is not None and _error_in(torch.float32, model, loss, batch) is None else ""


def _error_in(dtype: torch.dtype, model: nn.Module, loss: nn.Module, batch: Batch) -> str | None:
    """Returns why a step of a copy of the model by plain torch has no result in ``dtype``; None if it has a result.

    It is the first line of an error, that the forward converts a parameter, or that the loss or a gradient is not
    finite.
    """
    copies = dict[int, Any]()
    own = structural_copy(model, partial(_cast, dtype), copies)
    if any(tensor.is_meta for tensor in (*own.parameters(), *own.buffers())):
        own.to_empty(device="cpu")  # operators on the meta device take tensors of unlike dtypes
    inputs, targets = tree_map_only(Tensor, partial(_cast, dtype), batch)
    try:
        loss_sum, _ = sum_and_count(copied_loss(loss, memo=copies)(call_plainly(own, inputs), unmarked(targets)))
        loss_sum.backward()
    except Exception as error:  # the model's own code may raise anything in a dtype that it does not run in
        return first_line(error)
    for name, parameter in own.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            return f"its forward converts '{name}' to {str(parameter.dtype).removeprefix('torch.')}"
    has_values = not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if has_values and not loss_sum.isfinite():
        return f"its loss is {loss_sum.item()}"
    unknown = first_not_finite({name: parameter.grad for name, parameter in own.named_parameters()})
    return f"the gradient of '{unknown}' is not finite" if has_values and unknown else None


def _compared(
    model: nn.Module, layout: Layout, batches: Sequence[Batch], loss: nn.Module, seed: int, ranks: Ranks,
    strategies: Any, alter: Callable[[Any], None] | None, launcher: Callable[..., Sequence[Any]] | None,
    roles: Mapping[str, str], seconds: Mapping[str, float], dtype: torch.dtype,
) -> Verdict:  # fmt: skip
    """Returns the verdict of a comparison in ``dtype``."""
    with left_untouched(model):
        copies = dict[int, Any]()
        plain = structural_copy(model, partial(_cast, dtype), copies)
        check_apart(model, plain)
        loss = copied_loss(loss, memo=copies)  # it refers to the copy where it referred to the model
        note_reads(loss, model, {})  # by a global name it refers to the model still
        first, batches = batches[0], [tree_map_only(Tensor, partial(_cast, dtype), batch) for batch in batches]
        loss = _fitting(dtype, plain, loss, first) if compute_dtype(dtype, layout) == dtype else loss
        job = job_for(plain, loss, layout, batches[0][0], tokens_of(batches[0][0], layout), roles)
        job = job._replace(seconds=seconds)
        plan, _ = make_plan(job, layout, strategies)  # raises LayoutError before any rank starts
        check_trains(plan)
        draws = job.graph.draws if job.graph is not None else None
        unrecorded = job.graph.failure_of_own_code if job.graph is not None else ""
        expected = reference(plain, loss, batches, seed, plan, draws, unrecorded=unrecorded)
        work = (plain, layout, batches, loss, seed, expected.eps, job.roles, job.seconds)
        if launcher is not None:
            outcomes = launcher(_rank, *work, strategies, alter)
        elif ranks == "processes":
            assert alter is None, "threads only"
            assert strategies is None, "threads only"
            outcomes = launch(_rank, layout, *work, ranks="processes", debug=True)
        else:
            outcomes = launch(_rank, layout, *work, strategies, alter, ranks="threads")
    narrow = compute_dtype(dtype, plan.layout)
    arguments = (plain, loss, batches, seed, plan, draws)
    device = next((outcome.device for outcome in outcomes if outcome.device != "cpu"), "cpu")

    def measure(differing: Mapping[tuple[str, str], float]) -> DeviceDifference:
        if narrow == dtype:
            return own_errors(*arguments, dtype, expected, device, differing)
        return narrow_errors(*arguments, expected, narrow, NARROW_FLOOR, device)  # errors of all tensors

    return compare_outcomes(plan, expected, outcomes, dtype, measure, shares_of(job, plan))


@exact_float32()
def _rank(
    world: World, plain: nn.Module, layout: Layout, batches: Sequence[Batch], loss: nn.Module, seed: int, eps: float,
    roles: Mapping[str, str], seconds: Mapping[str, float], strategies: Any = None,
    alter: Callable[[Any], None] | None = None,
) -> TrainingOutcome:  # fmt: skip
    num_tokens = tokens_of(batches[0][0], layout)
    run = parallelize(
        plain, layout, world, loss=loss, seed=seed, num_tokens=num_tokens, strategies=strategies, roles=roles,
        example=batches[0][0], seconds=seconds, check_every=0,  # the comparison below says more
    )  # fmt: skip
    if layout.compile is not None:
        _compile(run, cloned(batches[0]))
    if alter is not None:
        alter(run)
    if run.plan.layout.precision != "fp32":  # the output is in float32 then, and some losses take targets of its dtype
        batches = [(inputs, tree_map_only(Tensor, partial(_cast, torch.float32), wanted)) for inputs, wanted in batches]
    optimizer = run.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, eps=eps)
    outcome = TrainingOutcome([], {}, {}, device=world.device.type)
    for step, batch in enumerate(run.shard(map(cloned, batches))):
        outcome.losses.append(_step(run, batch))
        if step == 0:
            outcome.gradients = copied_gradients(run.parameters)
        optimizer.step()
    outcome.parameters = {name: p.detach().cpu() for name, p in run.parameters.items()}
    outcome.buffers = copied_buffers(run.model)
    return outcome


def _compile(run: Run, batch: Batch) -> None:
    """Takes steps whose results are dropped, so that blocks are compiled: the first step runs uncompiled."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in run.model.modules() for name, buffer in module._buffers.items() if buffer is not None
    ]  # fmt: skip
    for part in run.shard([batch] * NUM_STEPS_TO_COMPILE):
        _step(run, part)
        run.num_steps -= 1
        for parameter in run.parameters.values():
            parameter.grad = None  # dropped on purpose
    for module, name, buffer, before in buffers:
        module._buffers[name] = buffer  # code may have put a new tensor in its place
        buffer.copy_(before)


def _step(run: Run, batch: Microbatch) -> float:
    """Returns the loss of one step; an fp16 step that overflows is repeated with the smaller loss scale."""
    while True:
        skipped = run.num_skipped
        loss = run.step(batch).item()
        if run.num_skipped == skipped:
            return loss
        run.num_steps -= 1  # the repeated step must draw the same random numbers


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Returns a copy of the tensor; a floating-point one is in ``dtype``, a complex one in its complex dtype."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex(), copy=True)
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _fitting(dtype: torch.dtype, model: nn.Module, loss: nn.Module, batch: Batch) -> nn.Module:
    """Returns the loss, or one whose float32 networks, as of a frozen teacher, are in ``dtype``, if that alone runs."""
    modules = (loss, *unregistered(loss))
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    if dtype == torch.float32 or all(tensor.dtype != torch.float32 for tensor in tensors):
        return loss
    if _error_in(dtype, model, loss, batch) is None:
        return loss

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype if tensor.dtype == torch.float32 else tensor.dtype, copy=True)

    parts = (part for kind in (model.modules, model.parameters, model.buffers) for part in kind())
    other = structural_copy(loss, cast, {id(part): part for part in parts})
    return other if _error_in(dtype, model, other, batch) is None else loss
