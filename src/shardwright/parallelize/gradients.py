"""A run's gradients between the step and the optimizer: clipped by their global norm, or added up over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.mesh import Coord
from shardwright.plan.plan import Plan
from shardwright.runtime.executor import Microbatch
from shardwright.sharding.box import read


@torch.no_grad()
def clip_norm(
    parameters: Mapping[str, nn.Parameter], plan: Plan, coord: Coord, everyone: Axis, max_norm: float
) -> Tensor:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``; returns the norm before."""
    square = torch.zeros((), dtype=torch.float64, device=everyone.device)
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        for piece in plan.state[name].gradient.owned(coord, plan.mesh):
            part = read(parameter.grad, piece, piece.whole)
            square += (part.abs() if part.is_complex() else part).double().square().sum()
    norm: Tensor = everyone.all_reduce(square).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    if gradients and scale < 1:
        torch._foreach_mul_(gradients, scale.item())
    return norm


@torch.no_grad()
def add_up(
    parameters: Mapping[str, nn.Parameter],
    batches: Iterable[Microbatch],
    step: Callable[[Microbatch], tuple[Tensor, float]],
) -> Tensor:
    """Runs ``step`` on each batch and leaves the gradients of the mean over the targets of all; returns that mean.

    ``step`` leaves the gradients of a batch's mean, and returns that mean and the number of targets.
    """
    sums: dict[str, Tensor] = {}
    means: list[tuple[Tensor, float]] = []
    for batch in batches:
        means.append(step(batch))
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.mul_(means[-1][1])
                sums[name] = sums[name].add_(gradient) if name in sums else gradient
                parameter.grad = None
    if not means:
        raise PlanError(
            "there are no batches to accumulate", given="none", allowed="one or more", fix="give the parts of run.shard"
        )
    divisor = sum(count for _, count in means) or 1.0
    for name, gradient in sums.items():
        parameters[name].grad = gradient.div_(divisor)
    return torch.stack([mean * (count / divisor) for mean, count in means]).sum()
