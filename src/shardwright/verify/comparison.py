"""Compares what ranks have trained with what one device has: the errors of each tensor, and how much is allowed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.mesh import Mesh
from shardwright.plan.plan import Plan, compute_dtype
from shardwright.plan.shares import CutShare
from shardwright.sharding.box import cut
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.verify.reference import (
    FLOOR,
    DeviceDifference,
    Named,
    TrainingOutcome,
    first_not_finite,
    scales,
)
from shardwright.verify.verdict import Verdict

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest relative error that counts as equal, by the dtype of the comparison."""

ROUNDINGS = 8
"""The largest relative error that counts as equal in bf16 and fp16, in roundings (eps) of that dtype."""

DEVICE_ERROR_FACTOR = 3
"""The factor by which a tensor's error may exceed one device's own rounding error, if that is beyond the tolerance."""

MAX_ROUNDINGS = 1000
"""The most that ``DEVICE_ERROR_FACTOR`` may allow, in roundings of the narrow dtype, since more would prove nothing.

Float64 counts as float32 here, so that a model that magnifies roundings is allowed no more than one that makes them.
"""

MAX_ERROR = 0.45
"""The most that ``DEVICE_ERROR_FACTOR`` may allow in any dtype.

A gradient that is missing, or twice as large, is off by 1, and one that lacks the part of one of two ranks by a half.
"""

NARROW_FLOOR = 0.1
"""The value in place of ``FLOOR``, the least divisor of an error, for gradients of layouts in bf16 and fp16."""


def _buffer_errors(plan: Plan, expected: TrainingOutcome, by_rank: Mapping[int, Named]) -> dict[str, float]:
    """Returns the error of each buffer; 0 or infinite for integers and for buffers that the steps do not change."""
    shapes = {name: tuple(buffer.shape) for name, buffer in expected.buffers.items()}
    layouts = {n: plan.buffers.get(n, TensorLayout.whole(shape)).of_shape(shape) for n, shape in shapes.items()}
    changed = {name: buffer for name, buffer in expected.buffers.items() if name in expected.changed}
    errors = _errors(layouts, plan.mesh, changed, by_rank)
    for name, whole in expected.buffers.items():
        if name in changed:
            continue
        layout = layouts[name]
        by_coord = ((plan.mesh.coord(rank), local.get(name)) for rank, local in by_rank.items())
        same = all(
            b is not None and torch.equal(cut(whole, layout.pieces(at), layout.local_shape(at)), b)
            for at, b in by_coord
            if layout.pieces(at)  # no pieces: the buffer belongs to another pipeline stage
        )
        errors[name] = 0.0 if same else float("inf")
    return errors


def _errors(
    layouts: Mapping[str, TensorLayout],
    mesh: Mesh,
    expected: Mapping[str, Tensor | None],
    by_rank: Mapping[int, Mapping[str, Tensor | None]],
    floor: float = FLOOR,
    *,
    allow_infinite: bool = True,
) -> dict[str, float]:
    """Returns the largest relative error of each tensor over all ranks; infinite if only one side has the tensor.

    With ``allow_infinite``, elements that are infinite alike on both sides are equal, as in a parameter that masks.
    Without, the error of a tensor that is not finite on one device is NaN.
    """
    errors = {}
    for name, scale in scales(expected, floor).items():
        whole, worst = expected[name], 0.0
        for rank, local in by_rank.items():
            coord, layout, actual = mesh.coord(rank), layouts[name], local.get(name)
            if whole is None:
                worst = worst if actual is None or not actual.numel() else float("inf")
                continue
            part = cut(whole, layout.pieces(coord), layout.local_shape(coord))
            if not part.numel() and (actual is None or not layout.pieces(coord)):
                continue  # this tensor belongs to another pipeline stage
            if actual is None or actual.shape != part.shape:
                worst = float("inf")
            elif part.numel():
                difference = (actual - part).abs()
                if allow_infinite and not difference.isfinite().all():
                    difference = difference.masked_fill(actual == part, 0.0)
                error = float(difference.max().nan_to_num(nan=float("inf"))) / scale
                worst = _largest((worst, error if allow_infinite or part.isfinite().all() else math.nan))
        errors[name] = worst
    return errors


def _presence(name: str, expected: TrainingOutcome, by_rank: Mapping[int, TrainingOutcome]) -> str:
    """Returns text on a gradient that only one side has; an empty text for any other."""
    whole = expected.gradients.get(name)
    for rank, outcome in by_rank.items() if name in expected.gradients else ():
        actual = outcome.gradients.get(name)
        if whole is None and actual is not None and actual.numel():
            kind = "one" if actual.any() else "one of zeros"
            return f"'{name}' has no gradient on one device, and {kind} on rank {rank}: with it, weight decay applies"
        if whole is not None and actual is None and name in outcome.gradients and name in outcome.parameters:
            return f"'{name}' has a gradient on one device, and none on rank {rank}"
    return ""


def _nan_of(expected: TrainingOutcome) -> str:
    """Returns text on a loss or gradient of one device that is not finite, which nothing equals; "" without one."""
    step_and_loss = next(((n, loss) for n, loss in enumerate(expected.losses, 1) if not math.isfinite(loss)), None)
    if step_and_loss is not None:
        return f"the loss of one device itself is {step_and_loss[1]} in step {step_and_loss[0]}"
    unknown = first_not_finite(expected.gradients)
    return f"the gradient of '{unknown}' on one device itself is not finite" if unknown else ""


def _largest(errors: Iterable[float]) -> float:
    """Returns the largest error; NaN if any is NaN, which ``max`` returns only if it comes first; 0 without errors."""
    every = list(errors)
    return math.nan if any(map(math.isnan, every)) else max(every, default=0.0)


def compare_outcomes(
    plan: Plan,
    expected: TrainingOutcome,
    outcomes: Sequence[TrainingOutcome],
    dtype: torch.dtype,
    measure: Callable[[Mapping[tuple[str, str], float]], DeviceDifference],
    cuts: Sequence[CutShare],
) -> Verdict:
    """Returns the verdict on the ranks' ``outcomes``, compared with that of one device (``expected``).

    ``measure`` returns one device's own rounding errors. It is called only if tensors differ by more than the
    tolerance, with their errors by kind and name.
    """
    narrow = compute_dtype(dtype, plan.layout)
    tolerance = TOLERANCE[dtype] if narrow == dtype else ROUNDINGS * torch.finfo(narrow).eps
    # a launcher that uses torchrun's ranks returns, in each process, that process's outcome only
    every_rank = len(outcomes) == plan.mesh.size
    by_rank = dict(enumerate(outcomes)) if every_rank else {int(os.environ["RANK"]): outcomes[0]}
    gradients, parameters, buffers, loss_error = _outcome_errors(
        plan, expected, by_rank, FLOOR if narrow == dtype else NARROW_FLOOR, exact=narrow == torch.float64
    )
    later = parameters | buffers
    differs = not all(error <= tolerance for error in (loss_error, *gradients.values(), *later.values()))
    kinds = {"gradients": gradients, "later": later}
    every = ((kind, name, error) for kind, errors in kinds.items() for name, error in errors.items())
    differing = {(kind, name): error for kind, name, error in every if not error <= tolerance}
    own = measure(differing) if differs else None
    numbers = {name for name, parameter in expected.parameters.items() if parameter.numel() == 1}
    allowed, own_error = _allowed(own, tolerance, numbers)
    errors = {
        name: _largest((gradients.get(name, 0.0), parameters.get(name, 0.0))) for name in expected.parameters
    } | buffers
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    beyond = [name for name, error in gradients.items() if not error <= allowed("gradients", name)]
    beyond += [name for name, error in later.items() if not error <= allowed("later", name) and name not in beyond]
    equal = not beyond and loss_error <= allowed("loss", "")
    said = [] if equal else [*(_presence(name, expected, by_rank) for name in beyond), _nan_of(expected)]
    if beyond and own is not None and loss_error <= allowed("loss", ""):
        may_be = [
            errors.get(name, 0.0) <= DEVICE_ERROR_FACTOR * of_device.get(name, 0.0)
            for errors, of_device in ((gradients, own.gradients), (later, own.later)) for name in beyond
        ]  # fmt: skip
        if all(may_be):
            said.append("each difference is as large as roundings on one device, more than can be allowed")
    return Verdict(
        equal=equal,
        max_relative_error=errors[worst],
        worst_parameter=worst,
        first_difference=beyond[0] if beyond else "",
        first_error=errors[beyond[0]] if beyond else loss_error,
        loss_error=loss_error,
        gradients_error=_largest(gradients.values()),
        parameters_error=_largest(parameters.values()),
        buffers_error=_largest(buffers.values()),
        tolerance=tolerance,
        parameters=len(gradients),
        world_size=plan.mesh.size,
        steps=len(expected.losses),
        allowed=max(allowed(kind, beyond[0] if beyond else worst) for kind in ("gradients", "later")),
        own_error=own_error,
        presence=next(filter(None, said), ""),
        shares={cut_share.factor: cut_share.share for cut_share in cuts},
        flops={cut_share.factor: cut_share.flops for cut_share in cuts if cut_share.flops is not None},
        left_whole="; ".join(str(cut_share) for cut_share in cuts if cut_share.is_low),
    )


class _OutcomeErrors(NamedTuple):
    """The relative errors of ranks' results, the largest of all ranks: of tensors by name, and of the loss."""

    gradients: dict[str, float]
    parameters: dict[str, float]
    buffers: dict[str, float]
    loss: float


def _outcome_errors(
    plan: Plan, expected: TrainingOutcome, by_rank: Mapping[int, TrainingOutcome], floor: float, *, exact: bool
) -> _OutcomeErrors:
    """Returns the errors of ranks' outcomes; unless ``exact``, only those of the first step's loss and gradients."""
    layouts = {name: state.gradient for name, state in plan.state.items()}
    local = {rank: outcome.gradients for rank, outcome in by_rank.items()}
    gradients = _errors(layouts, plan.mesh, expected.gradients, local, floor, allow_infinite=False)
    parameters, buffers = dict[str, float](), dict[str, float]()
    if exact:
        layouts = {name: state.parameter for name, state in plan.state.items()}
        after = {rank: outcome.parameters for rank, outcome in by_rank.items()}
        parameters = _errors(layouts, plan.mesh, expected.parameters, after)
        buffers = _buffer_errors(plan, expected, {rank: outcome.buffers for rank, outcome in by_rank.items()})
    num_losses = len(expected.losses) if exact else 1
    loss = _largest(
        abs(actual - reference) / max(abs(reference), 1e-30)
        for outcome in by_rank.values()
        for actual, reference in list(zip(outcome.losses, expected.losses, strict=True))[:num_losses]
    )
    return _OutcomeErrors(gradients, parameters, buffers, loss)


def _allowed(
    own: DeviceDifference | None, tolerance: float, numbers: Collection[str]
) -> tuple[Callable[[str, str], float], float]:
    """Returns a function of (kind, name) for the largest allowed error, and the largest of one device's own errors.

    ``numbers`` are the names of parameters of one element.
    """
    if own is None:
        return lambda kind, name: tolerance, 0.0
    kinds = {"loss": {"": own.loss}, "gradients": own.gradients, "later": own.later}
    rounding = torch.finfo(own.narrowest).eps
    most = min(MAX_ROUNDINGS * max(rounding, torch.finfo(torch.float32).eps), MAX_ERROR)
    largest = max(error for errors in kinds.values() for error in errors.values())

    def allowed(kind: str, name: str) -> float:
        error = kinds[kind].get(name, 0.0)
        # a single number, such as a gate's, adds up all roundings, which may cancel by chance in one comparison
        error = max(kinds[kind].values(), default=0.0) if name in numbers else error
        # the loss is a single number too, and depends on everything that rounds
        rounds = (largest if kind == "loss" else error) > tolerance
        return max(tolerance, min(max(DEVICE_ERROR_FACTOR * error, rounding if rounds else 0.0), most))

    return allowed, largest if largest > tolerance else 0.0
