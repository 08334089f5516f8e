"""Runs random operators, such as dropout, on global tensors with numbers that do not depend on the layout.

Every rank draws the numbers of the whole global tensor and keeps its part of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.global_tensor.creation import draw, local_part
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.rules.call import OperatorCall, refusal
from shardwright.global_tensor.tensor import GlobalTensor, without_sums, wrap


def _drawn(
    call: OperatorCall, x: GlobalTensor, layout: GlobalLayout, dtype: torch.dtype, fill: str, *numbers: Any
) -> Tensor:
    if call.kwargs.get("generator") is not None:
        raise refusal(call, "a generator belongs to one rank", "torch's default generator")
    return local_part(draw(x.shape, dtype, fill, *numbers), layout, x._local_tensor.device)


def _layout_without_sums(x: GlobalTensor) -> GlobalLayout:
    return GlobalLayout(x.placement, without_sums(x.sbp))


def _in_place(fill: str) -> Callable[[OperatorCall], GlobalTensor]:
    def handler(call: OperatorCall) -> GlobalTensor:
        x: GlobalTensor = call.tensors[0]
        if len(call.tensors) > 1:
            raise refusal(call, "its probabilities are a tensor", "one number")
        with torch.no_grad():
            x._local_tensor.copy_(_drawn(call, x, GlobalLayout(x.placement, x.sbp), x.dtype, fill, *call.args[1:]))
        return x

    return handler


def _like(fill: str) -> Callable[[OperatorCall], GlobalTensor]:
    def handler(call: OperatorCall) -> GlobalTensor:
        if call.name == "bernoulli" and call.func._overloadname != "p":
            raise refusal(call, "its probabilities are a tensor", "one number")
        x = call.tensors[0]
        layout, dtype = _layout_without_sums(x), call.kwargs.get("dtype") or x.dtype
        return wrap(_drawn(call, x, layout, dtype, fill, *call.args[1:]), x.shape, layout)

    return handler


def _dropout(call: OperatorCall) -> tuple[GlobalTensor, GlobalTensor]:
    x, p, training = call.args[0], call.arg("p"), call.arg("train")
    layout = _layout_without_sums(x)
    x = x.to_global(layout.placement, layout.sbp)
    if training is False or p == 0:
        keep = torch.ones(x._local_tensor.shape, dtype=torch.bool, device=x._local_tensor.device)
        scale = 1.0
    else:
        keep = _drawn(call, x, layout, torch.float32, "bernoulli_", 1 - p).bool()
        scale = 1 / (1 - p) if p < 1 else 0.0
    out = x._local_tensor * keep.to(x._local_tensor.dtype) * scale
    return wrap(out, x.shape, layout), wrap(keep, x.shape, layout)


_FILLS = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_")

HANDLERS: dict[str, Callable[[OperatorCall], Any]] = {
    **{name: _in_place(name) for name in _FILLS},
    "rand_like": _like("uniform_"),
    "randn_like": _like("normal_"),
    "bernoulli": _like("bernoulli_"),
    "native_dropout": _dropout,
}
