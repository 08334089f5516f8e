"""Split backward: an action ``I`` computes input gradients, and the action ``W`` the weight gradients, later.

While ``I`` runs, Linear layers and convolutions append their weight-gradient computation to :class:`DeferredGradients`
instead of running it; ``W`` runs it. The products are those of torch's own backward, in another order, so nothing is
computed twice. All other layers compute their weight gradients in ``I``. Used by zero-bubble pipeline schedules.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwright.analysis.traced.convolution_chains import CONVOLUTIONS
from shardwright.analysis.traced.structure import runs_as
from shardwright.comm.autograd import once
from shardwright.forward_stack import Rung, set_forward
from shardwright.row_numbers import give_rows, is_of_rows, rows_of

_PACKAGE = __name__.partition(".")[0]


def has_hook_of_user(parameter: Tensor) -> bool:
    """Returns whether a hook on a parameter's gradient, other than this library's own, waits for autograd to call it.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> _ = weight.register_post_accumulate_grad_hook(print)
    >>> has_hook_of_user(weight), has_hook_of_user(torch.ones(2))
    (True, False)
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    others = (hook for hook in hooks.values() if getattr(hook, "__module__", "").partition(".")[0] != _PACKAGE)
    return bool(parameter._backward_hooks) or any(True for _ in others)


@dataclass
class DeferredGradients:
    """The weight-gradient computations that a rank has deferred, by (chunk, microbatch); see :func:`split_backward`."""

    _computations: dict[tuple[int, int], list[Callable[[], None]]] = field(default_factory=dict)
    _collecting: tuple[int, int] | None = None

    @contextmanager
    def collecting(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Returns a context for an input-gradient backward (``I``) inside which layers defer their weight gradients."""
        self._collecting = (chunk, microbatch)
        self._computations[self._collecting] = []
        try:
            yield
        finally:
            self._collecting = None

    def accepts(self, parameter: Tensor | None) -> bool:
        """Returns whether a layer's backward may now defer the gradient of ``parameter`` to the action ``W``.

        It may during an action ``I`` only, and only if the parameter is a leaf and no hook of the user waits for
        autograd to accumulate the gradient. This library's own hooks may be there: the executor counts a deferred
        gradient as complete at the action ``W``.
        """
        if self._collecting is None or parameter is None or not parameter.is_leaf:
            return False
        return not has_hook_of_user(parameter)

    def append(self, compute: Callable[[], None]) -> None:
        """Keeps ``compute``, which accumulates a weight gradient, until this microbatch's weight backward (``W``)."""
        assert self._collecting is not None, "gradients are deferred only while an action I runs"
        self._computations[self._collecting].append(compute)

    def run(self, chunk: int, microbatch: int) -> None:
        """Runs the action ``W``: computes the deferred weight gradients of a chunk and microbatch, in order."""
        with torch.no_grad():
            for compute in self._computations.pop((chunk, microbatch), ()):
                compute()


def split_backward(model: nn.Module, deferred: DeferredGradients) -> None:
    """Makes every plain Linear and convolution of ``model`` defer its weight gradients to ``deferred``.

    A layer whose forward a strategy has replaced keeps that forward. Both gradients are computed at once under
    autocast, where a weight is no leaf, and in a convolution of complex numbers or of one unbatched sample.

    >>> model, deferred = nn.Linear(2, 2), DeferredGradients()
    >>> split_backward(model, deferred)
    >>> with deferred.collecting(0, 0):
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None
    True
    >>> deferred.run(0, 0)
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
    """Returns whether a layer's backward can be split: a Linear or convolution that runs torch's own code.

    Transposed convolutions cannot, nor convolutions with a ``padding_mode`` other than zeros or padding given as text.

    >>> may_split(nn.Linear(2, 2)), may_split(nn.Conv1d(2, 2, 3, padding="same"))
    (True, False)
    """
    if any(runs_as(module, kind) for kind in CONVOLUTIONS):
        convolution: Any = module
        return convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)
    return runs_as(module, nn.Linear)


def _autocasts(x: Tensor) -> bool:
    """Whether autocast is on, so that a layer multiplies in another dtype than that of its weights."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _linear(layer: Any, deferred: DeferredGradients, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    if _autocasts(input):
        return nn.functional.linear(input, weight, bias)
    y: Tensor = _Linear.apply(input, weight, bias, deferred, (weight, bias))
    if is_of_rows(input):  # a Function is unseen by the mode SelectedRows
        give_rows(y, rows_of(input))
    return y


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_hk: Tensor, bias_h: Tensor | None, deferred: DeferredGradients, owners: Any
    ) -> Tensor:
        ctx.save_for_backward(x, w_hk)
        ctx.deferred, ctx.owners = deferred, owners
        return nn.functional.linear(x, w_hk, bias_h).detach()  # no view, since later code may write into it in place

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, w_hk = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        weight, bias = ctx.owners
        dy_nh, x_nk = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (dy_nh @ w_hk.conj()).view(x.shape) if needs_x else None
        defer_w = needs_w and ctx.deferred.accepts(weight)
        defer_bias = needs_bias and ctx.deferred.accepts(bias)
        if defer_w or defer_bias:

            def compute() -> None:
                if defer_w:
                    add_product(weight, dy_nh, x_nk)
                if defer_bias:
                    add(bias, dy_nh.sum(0))

            ctx.deferred.append(compute)
        dw = dy_nh.T @ x_nk.conj() if needs_w and not defer_w else None
        return dx, dw, dy_nh.sum(0) if needs_bias and not defer_bias else None, None, None


def _convolution(layer: Any, deferred: DeferredGradients, input: Tensor) -> Tensor:
    if _autocasts(input) or input.dim() != layer.weight.dim() or layer.weight.is_complex():
        unsplit: Tensor = type(layer).forward(layer, input)  # torch's own code also runs one sample, or complex numbers
        return unsplit
    settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
    y: Tensor = _Convolution.apply(input, layer.weight, layer.bias, deferred, (layer.weight, layer.bias), settings)
    return y


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferred: DeferredGradients,
        owners: Any,
        settings: Any,
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
        defer_w = needs_w and ctx.deferred.accepts(weight)
        defer_bias = needs_bias and ctx.deferred.accepts(bias)
        stride, padding, dilation, groups = ctx.settings

        def gradients(*wanted: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
            sizes = None if bias is None else list(bias.shape)
            computed: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
                dy, x, kernel, sizes, stride, padding, dilation, False, [0] * len(stride), groups, list(wanted)
            )
            return computed

        if defer_w or defer_bias:

            def compute() -> None:
                _, dw, dbias = gradients(False, defer_w, defer_bias)
                for owner, gradient in ((weight, dw), (bias, dbias)):
                    if gradient is not None:
                        add(owner, gradient)

            ctx.deferred.append(compute)
        now = (needs_x, needs_w and not defer_w, needs_bias and not defer_bias)
        dx, dw, dbias = gradients(*now) if any(now) else (None, None, None)
        return dx, dw, dbias, None, None, None


def add(parameter: Any, gradient: Tensor) -> None:
    """Accumulates a gradient into ``parameter.grad`` as autograd does: the first is stored without a copy."""
    with torch._C.DisableTorchFunctionSubclass():  # a parameter may be resharded by then
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def add_product(parameter: Any, dy_nh: Tensor, x_nk: Tensor) -> None:
    """Accumulates a linear layer's weight gradient dY^T X into ``parameter.grad``, without a temporary."""
    with torch._C.DisableTorchFunctionSubclass():  # as in :func:`add`
        if parameter.grad is None:
            parameter.grad = dy_nh.T @ x_nk.conj()
        else:
            parameter.grad.addmm_(dy_nh.T, x_nk.conj())
