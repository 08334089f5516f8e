"""Multiplies by a weight whose output features on a rank are partly the rank's own and partly on all ranks.

::

    fused query, key and value of multi-query attention on two ranks: each has its query heads, all have the key head

                rank 0                     rank 1
    weight      q0 q1          k v         q2 q3          k v
    output      q0 q1          k v         q2 q3          k v
    gradient    q0 q1          k v         q2 q3          -      of the input: k and v count on the first rank alone

The gradient of the weight is complete on every rank. That of the input is a partial sum, which the caller all-reduces:
the features that all ranks have would count once for each rank, so only the first one counts them.

T samples and tokens, k input features, h output features of this rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.comm.autograd import once

RangesOfRank = Sequence[tuple[int, int]]


def partly_shared_product(
    x_Tk: Tensor, weight: Tensor, bias_h: Tensor | None, shared: RangesOfRank, *, is_first: bool, transposed: bool
) -> Tensor:
    """Returns ``x_Tk`` times a weight, with the output features in ``shared`` left out of the gradient of ``x_Tk``.

    They are left out unless ``is_first``. ``shared`` are ranges (start, stop) of this rank's output features.

    Shapes: x_Tk (..., k); weight (h, k), the order of ``nn.Linear.weight``, or (k, h) if not ``transposed``; bias_h
        (h,) or None; returns (..., h).
    Traffic: none; the caller adds up the gradient of ``x_Tk`` over the ranks.

    >>> x, weight = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2)
    >>> for is_first in (True, False):
    ...     y = partly_shared_product(x, weight, None, [(2, 3)], is_first=is_first, transposed=True)
    ...     print(y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist())
    [[2.0, 2.0, 2.0]] [[3.0, 3.0]]
    [[2.0, 2.0, 2.0]] [[2.0, 2.0]]
    """
    kind = x_Tk.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x_Tk, weight = x_Tk.to(dtype), weight.to(dtype)
        bias_h = bias_h if bias_h is None else bias_h.to(dtype)
    return _SharedProduct.apply(x_Tk, weight, bias_h, shared, is_first, transposed)  # type: ignore[no-any-return]


class _SharedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_Tk: Tensor,
        weight: Tensor,
        bias_h: Tensor | None,
        shared: RangesOfRank,
        is_first: bool,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_Tk, weight)
        ctx.left_out, ctx.transposed = () if is_first else tuple(shared), transposed
        return functional.linear(x_Tk, weight if transposed else weight.t(), bias_h)

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Any) -> Any:
        (g_Th,), (x_Tk, weight) = gradients, ctx.saved_tensors
        g_x = g_weight = g_bias = None
        if ctx.needs_input_grad[0]:
            counted = g_Th.clone() if ctx.left_out else g_Th
            for start, stop in ctx.left_out:
                counted[..., start:stop].zero_()
            g_x = counted @ (weight if ctx.transposed else weight.t())
        flat = g_Th.reshape(-1, g_Th.shape[-1])
        if ctx.needs_input_grad[1]:
            rows = x_Tk.reshape(-1, x_Tk.shape[-1])
            g_weight = flat.t() @ rows if ctx.transposed else rows.t() @ flat
        if ctx.needs_input_grad[2]:
            g_bias = flat.sum(0)
        return g_x, g_weight, g_bias, None, None, None
