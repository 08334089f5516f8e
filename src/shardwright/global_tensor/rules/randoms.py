"""Random numbers: those of the whole tensor, of which each member takes its part, so that no layout shows in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.current_world import here
from shardwright.global_tensor.creation import agreed_seed
from shardwright.global_tensor.geometry import GlobalLayout, boxes, terms
from shardwright.global_tensor.rules.call import OperatorCall, refusal
from shardwright.global_tensor.sbp import broadcast
from shardwright.global_tensor.tensor import GlobalTensor, wrap


def _drawn(
    call: OperatorCall, shape: tuple[int, ...], where: GlobalLayout, dtype: torch.dtype, fill: str, *numbers: Any
) -> Tensor:
    """This rank's part of a whole that is drawn from a seed all ranks agree on."""
    if call.kwargs.get("generator") is not None:
        raise refusal(call, "a generator of one rank's own", "torch's default generator")
    generator = torch.Generator().manual_seed(agreed_seed())
    whole: Tensor = getattr(torch.empty(shape, dtype=dtype), fill)(*numbers, generator=generator)
    held = boxes(shape, where).get(here().rank)
    if held is None:
        return whole.new_empty((0,) * max(len(shape), 1))
    part = whole[held.slices].contiguous().to(call.tensors[0]._local_tensor.device)
    return torch.zeros_like(part) if terms(where)[here().rank] else part


def _filled(fill: str) -> Callable[[OperatorCall], GlobalTensor]:
    def handler(call: OperatorCall) -> GlobalTensor:
        x = call.tensors[0]
        if len(call.tensors) > 1:
            raise refusal(call, "probabilities that are a tensor", "one number")
        values = _drawn(call, tuple(x.shape), GlobalLayout(x.placement, x.sbp), x.dtype, fill, *call.args[1:])
        with torch.no_grad():
            x._local_tensor.copy_(values)
        return x  # type: ignore[no-any-return]

    return handler


def _like(fill: str) -> Callable[[OperatorCall], GlobalTensor]:
    def handler(call: OperatorCall) -> GlobalTensor:
        x = call.tensors[0]
        where = GlobalLayout(x.placement, tuple(broadcast if one.is_partial() else one for one in x.sbp))
        dtype = call.kwargs.get("dtype") or x.dtype
        return wrap(_drawn(call, tuple(x.shape), where, dtype, fill, *call.args[1:]), x.shape, where)

    return handler


def _dropped(call: OperatorCall) -> tuple[GlobalTensor, GlobalTensor]:
    x, p, training = call.args[0], call.arg("p"), call.arg("train")
    where = GlobalLayout(x.placement, tuple(broadcast if one.is_partial() else one for one in x.sbp))
    x = x.to_global(where.placement, where.sbp)
    if training is False or p == 0:
        keep = torch.ones(x._local_tensor.shape, dtype=torch.bool, device=x._local_tensor.device)
        scale = 1.0
    else:
        keep = _drawn(call, tuple(x.shape), where, torch.float32, "bernoulli_", 1 - p).bool()
        scale = 1 / (1 - p) if p < 1 else 0.0
    out = x._local_tensor * keep.to(x._local_tensor.dtype) * scale
    return wrap(out, x.shape, where), wrap(keep, x.shape, where)


def _bernoulli(call: OperatorCall) -> GlobalTensor:
    if call.func._overloadname != "p":
        raise refusal(call, "probabilities that are a tensor", "one number")
    x = call.tensors[0]
    where = GlobalLayout(x.placement, tuple(broadcast if one.is_partial() else one for one in x.sbp))
    return wrap(_drawn(call, tuple(x.shape), where, x.dtype, "bernoulli_", *call.args[1:]), x.shape, where)


HANDLERS: dict[str, Callable[[OperatorCall], Any]] = {
    **{name: _filled(name) for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_")},
    "rand_like": _like("uniform_"),
    "randn_like": _like("normal_"),
    "bernoulli": _bernoulli,
    "native_dropout": _dropped,
}
