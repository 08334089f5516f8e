"""Linear layers and convolutions whose backward can be done in two: the input's gradient, later the weights'.

The same products as in torch's own backward, in another order: nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwright.analysis.structure import runs_as
from shardwright.comm.autograd import once
from shardwright.forward_stack import Rung, set_forward

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Leaves(Protocol):
    """Who takes weight gradients that are wanted later."""

    def takes(self, parameter: Tensor | None) -> bool:
        """Whether this parameter's gradient is wanted later: asked in backward."""
        ...

    def leave(self, work: Callable[[], None]) -> None:
        """Keeps the work that makes it."""
        ...


def split_backward(model: nn.Module, deferred: Leaves) -> None:
    """Lets every plain Linear and convolution of ``model`` leave its weights' gradients to ``deferred``.

    A layer that a strategy has given a forward of its own is left alone, and so is one whose weight is no leaf. Under
    autocast both gradients are made at once, and so are those of a convolution of complex numbers or of one sample.

    >>> from shardwright.operators.deferred_gradients import DeferredGradients
    >>> model, deferred = nn.Linear(2, 2), DeferredGradients()
    >>> split_backward(model, deferred)
    >>> with deferred.collecting(0, 0):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None
    True
    >>> deferred.do(0, 0)
    >>> model.weight.grad
    tensor([[1., 1.],
            [1., 1.]])
    """
    for module in model.modules():
        if may_split(module):
            forward = partial(_linear if isinstance(module, nn.Linear) else _convolution, module, deferred)
            what = "the input's gradient first, the weights' later"
            set_forward(module, Rung.SPLIT_BACKWARD, what, by="pipeline", forward=forward)


def may_split(module: nn.Module) -> bool:
    """Whether a layer's backward can be done in two: a Linear or convolution whose code is torch's own.

    >>> may_split(nn.Linear(2, 2)), may_split(nn.Conv1d(2, 2, 3, padding="same"))
    (True, False)
    """
    convolution = any(runs_as(module, kind) for kind in CONVOLUTIONS)
    return runs_as(module, nn.Linear) or (convolution and _is_plain(module))


def _is_plain(convolution: Any) -> bool:
    return convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast is on, under which a layer multiplies in another precision than its weights have."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _linear(layer: Any, deferred: Leaves, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if _is_cast(input):
        return nn.functional.linear(input, weight, bias)
    y: Tensor = _Linear.apply(input, weight, bias, deferred, (weight, bias))  # type: ignore[no-untyped-call]
    return y


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_hk: Tensor, bias_h: Tensor | None, deferred: Leaves, owners: Any) -> Tensor:
        ctx.save_for_backward(x, w_hk)
        ctx.deferred, ctx.owners = deferred, owners
        return nn.functional.linear(x, w_hk, bias_h).detach()  # no view: the code that follows may write into it

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, w_hk = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        weight, bias = ctx.owners
        dy_nh, x_nk = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (dy_nh @ w_hk.conj()).view(x.shape) if needs_x else None
        later_w = needs_w and ctx.deferred.takes(weight)
        later_bias = needs_bias and ctx.deferred.takes(bias)
        if later_w or later_bias:

            def work() -> None:
                if later_w:
                    add_product(weight, dy_nh, x_nk)
                if later_bias:
                    add(bias, dy_nh.sum(0))

            ctx.deferred.leave(work)
        dw = dy_nh.T @ x_nk.conj() if needs_w and not later_w else None
        return dx, dw, dy_nh.sum(0) if needs_bias and not later_bias else None, None, None


def _convolution(layer: Any, deferred: Leaves, input: Tensor) -> Tensor:
    if _is_cast(input) or input.dim() != layer.weight.dim() or layer.weight.is_complex():
        whole: Tensor = type(layer).forward(layer, input)  # one sample, or two products of torch's own
        return whole
    settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
    y: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        input, layer.weight, layer.bias, deferred, (layer.weight, layer.bias), settings
    )
    return y


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: Leaves, owners: Any, settings: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferred, ctx.owners, ctx.settings = deferred, owners, settings
        stride, padding, dilation, groups = settings
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, (0,) * len(stride), groups)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, kernel = ctx.saved_tensors
        weight, bias = ctx.owners
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        later_w = needs_w and ctx.deferred.takes(weight)
        later_bias = needs_bias and ctx.deferred.takes(bias)
        stride, padding, dilation, groups = ctx.settings

        def gradients(*wanted: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            sizes = None if bias is None else list(bias.shape)
            found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
                dy, x, kernel, sizes, stride, padding, dilation, False, [0] * len(stride), groups, list(wanted)
            )
            return found

        if later_w or later_bias:

            def work() -> None:
                _, dw, dbias = gradients(False, later_w, later_bias)
                for owner, gradient in ((weight, dw), (bias, dbias)):
                    if gradient is not None:
                        add(owner, gradient)

            ctx.deferred.leave(work)
        now = (needs_x, needs_w and not later_w, needs_bias and not later_bias)
        dx, dw, dbias = gradients(*now) if any(now) else (None, None, None)
        return dx, dw, dbias, None, None, None


def add(parameter: Any, gradient: Tensor) -> None:
    """What autograd does at a leaf: the first gradient is taken as it is, others are added to it."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def add_product(parameter: Any, dy_nh: Tensor, x_nk: Tensor) -> None:
    """Adds a weight's gradient to what is there, in the same pass as the product."""
    if parameter.grad is None:
        parameter.grad = dy_nh.T @ x_nk.conj()
    else:
        parameter.grad.addmm_(dy_nh.T, x_nk.conj())
