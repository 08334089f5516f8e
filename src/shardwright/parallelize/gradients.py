"""Clips a run's gradients by their global norm, or accumulates them over several batches, before the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.mesh import Coord
from shardwright.models.losses import mean_of
from shardwright.plan.plan import Plan
from shardwright.runtime.executor import Microbatch
from shardwright.runtime.mixed_precision import scale_gradients
from shardwright.sharding.box import read


@torch.no_grad()
def clip_norm(
    parameters: Mapping[str, nn.Parameter], plan: Plan, coord: Coord, everyone: Axis, max_norm: float
) -> Tensor:
    """Scales gradients so that their 2-norm over the whole model is at most ``max_norm``; returns the norm from before.

    Each element counts once, however many ranks hold a copy of it. A norm that is smaller, or is NaN, leaves the
    gradients as they are. The result is a float64 scalar, equal on every rank. On a single rank the norm and the
    gradients equal those of ``torch.nn.utils.clip_grad_norm_`` to the last bit; several ranks sum squares in float64.

    Traffic: one all-reduce of one float64 over ``everyone``, the axis of all ranks.
    """
    if everyone.size == 1:
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        )
        _scale_to(parameters, norm, max_norm)
        return norm.double()
    square = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        for piece in plan.state[name].gradient.owned(coord, plan.mesh):
            part = read(parameter.grad, piece, piece.whole)
            square += (part.abs() if part.is_complex() else part).double().square().sum()
    norm = everyone.all_reduce(square).sqrt()
    _scale_to(parameters, norm, max_norm)
    return norm


def _scale_to(parameters: Mapping[str, nn.Parameter], norm: Tensor, max_norm: float) -> None:
    scale = max_norm / (norm + 1e-6)
    scale_gradients(parameters.values(), torch.where(scale < 1, scale, 1.0))  # a norm that is NaN scales nothing


@torch.no_grad()
def add_up(
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Microbatch],
    step: Callable[[Microbatch], tuple[Tensor, Tensor]],
) -> Tensor:
    """Accumulates gradients over several batches, and returns the mean loss over the targets of all of them.

    The gradients of this mean end in the parameters' ``grad``. ``step(batch)`` must put the gradients of one batch's
    mean loss there, and return that mean and the batch's number of targets.

    Raises: PlanError: there are no batches.
    """
    sums: dict[str, Tensor] = {}
    means: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        means.append(step(batch))
        scale_gradients(parameters.values(), means[-1][1])
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                sums[name] = sums[name].add_(parameter.grad) if name in sums else parameter.grad
                parameter.grad = None
    mean, divisor = _mean_and_divisor(means, "accumulate")
    for name, gradient in sums.items():
        parameters[name].grad = gradient
    scale_gradients(parameters.values(), 1 / divisor)
    return mean


def mean_of_batches(means: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the mean over all targets of several batches, from each batch's mean and number of targets.

    Raises: PlanError: there are no batches.

    >>> mean_of_batches([(torch.tensor(1.0), torch.tensor(3)), (torch.tensor(5.0), torch.tensor(1))])
    tensor(2.)
    """
    return _mean_and_divisor(means, "evaluate")[0]


def _mean_and_divisor(means: Sequence[tuple[Tensor, Tensor]], use: str) -> tuple[Tensor, Tensor]:
    if not means:
        what, fix = f"there are no batches to {use}", "give the parts of run.shard"
        raise PlanError(what, given="none", allowed="one or more", fix=fix)
    total = torch.stack([count for _, count in means]).sum()
    return mean_of(torch.stack([mean * count for mean, count in means]).sum(), total)
