"""Checks that all ranks begin with the same model: copies that start different stay so, and their sums mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shardwright.comm.agreement import Difference, check_agreement, first_difference_async, tensor_digest
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.errors import PlanError


def check_same_start(everyone: Axis, world: World, model: nn.Module, seed: int) -> None:
    """Raises PlanError, on every rank, unless all begin with the same parameters, buffers and seed.

    Sparse tensors are compared by their shape alone.
    Traffic: one all-reduce of two numbers; where ranks are threads, another, unless they share the tensors themselves.

    >>> from shardwright import launch
    >>> model = nn.Linear(2, 2)
    >>> launch(lambda world: check_same_start(world.everyone(), world, model, seed=0), 2, ranks="threads")
    [None, None]
    """
    if everyone.size == 1 or everyone.device.type == "meta":  # no peers, or no values: spare the digests
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if world.local and first_difference_async(everyone, _lines(seed, tensors, _address))() is None:
        return  # threads that were given one model: no need to read its values
    check_agreement(
        everyone, _lines(seed, tensors, lambda tensor: f"values {tensor_digest(tensor)}"), _different_models
    )


def _lines(seed: int, tensors: Mapping[str, Tensor], content: Callable[[Tensor], str]) -> list[str]:
    lines = [f"seed {seed}"]
    for name, tensor in tensors.items():
        has_values = not tensor.is_meta and tensor.layout is torch.strided
        told = content(tensor) if has_values else "without values"
        lines.append(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, {told}")
    return lines


def _address(tensor: Tensor) -> str:
    return f"{tensor.device} {tensor.data_ptr()} {tensor.stride()}"


def _different_models(found: Difference) -> PlanError:
    return PlanError(
        "ranks were given different models, and would train copies that are none, or mix parts of several",
        given=str(found),
        allowed="the same parameters, buffers and seed on every rank",
        fix="build the model under sw.without_values(), which starts alike anywhere, or once before launch(), or "
        "load one checkpoint on every rank; where ranks are processes, torch.manual_seed(0) before building does",
    )
